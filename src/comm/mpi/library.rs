//! The calls of MPI that the backend makes, with their return codes checked.
//!
//! MPI is initialised for one call at a time, from any thread: callers hold the world's lock.

use ::mpi::ffi;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;

/// Largest message: counts of MPI are C's `int`.
pub(super) const MAX_MESSAGE_BYTES: usize = 1 << 30;

/// Largest tag that every MPI takes.
pub(super) const MAX_TAG: c_int = 32_767;

/// A communicator: an ordered set of processes whose messages meet no others.
#[derive(Debug, Clone, Copy)]
pub(super) struct Communicator(ffi::MPI_Comm);

// SAFETY: a handle, which MPI lets any thread use; the world's lock sees to one at a time.
unsafe impl Send for Communicator {}
// SAFETY: as above.
unsafe impl Sync for Communicator {}

/// A message in progress. MPI holds on to its buffer until a test has said that it is complete.
#[derive(Debug)]
pub(super) struct Request(ffi::MPI_Request);

// SAFETY: as for a communicator.
unsafe impl Send for Request {}

/// A message that has arrived and was not yet received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Arrived {
    /// The sender's rank.
    pub(super) source: usize,
    pub(super) bytes: usize,
}

/// What MPI says of a return code.
fn checked(code: c_int) -> Result<(), String> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = [0_u8; ffi::MPI_MAX_ERROR_STRING as usize + 1];
    let mut length: c_int = 0;
    // SAFETY: the text has room for the longest message and its end.
    let described =
        unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &raw mut length) } == 0 && length > 0;
    let message = String::from_utf8_lossy(&text[..usize::try_from(length).unwrap_or(0).min(text.len())]);
    Err(if described { message.into_owned() } else { format!("error code {code}") })
}

/// A number that MPI takes as C's `int`.
fn int(number: usize) -> Result<c_int, String> {
    c_int::try_from(number).map_err(|_| format!("{number} is more than MPI counts"))
}

impl Communicator {
    /// All processes of the job.
    pub(super) fn of_all_processes() -> Self {
        // SAFETY: a constant of the library.
        Self(unsafe { ffi::RSMPI_COMM_WORLD })
    }

    /// This process's rank.
    pub(super) fn rank(self) -> Result<usize, String> {
        let mut rank: c_int = 0;
        // SAFETY: a communicator that lives, and a variable that outlives the call.
        checked(unsafe { ffi::MPI_Comm_rank(self.0, &raw mut rank) })?;
        Ok(rank as usize)
    }

    /// Number of ranks.
    pub(super) fn size(self) -> Result<usize, String> {
        let mut size: c_int = 0;
        // SAFETY: a communicator that lives, and a variable that outlives the call.
        checked(unsafe { ffi::MPI_Comm_size(self.0, &raw mut size) })?;
        Ok(size as usize)
    }

    /// Divides the communicator, collectively: blocks until all ranks have called it. Its errors
    /// come back as return codes.
    pub(super) fn split(self, color: Option<usize>, key: usize) -> Result<Option<Self>, String> {
        // SAFETY: a constant of the library.
        let undefined = unsafe { ffi::RSMPI_UNDEFINED };
        let color = color.map_or(Ok(undefined), int)?;
        self.derived(|new| {
            let key = int(key)?;
            // SAFETY: a communicator that lives, and a variable that outlives the call.
            checked(unsafe { ffi::MPI_Comm_split(self.0, color, key, new) })
        })
    }

    /// The ranks that share this one's memory. Collective.
    pub(super) fn split_by_host(self) -> Result<Option<Self>, String> {
        self.derived(|new| {
            // SAFETY: a communicator that lives, constants, and a variable that outlives the call.
            checked(unsafe {
                ffi::MPI_Comm_split_type(self.0, ffi::RSMPI_COMM_TYPE_SHARED, 0, ffi::RSMPI_INFO_NULL, new)
            })
        })
    }

    /// Begins to wait for all ranks. Collective, and does not block.
    pub(super) fn begin_barrier(self) -> Result<Request, String> {
        // SAFETY: a constant of the library.
        let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
        // SAFETY: a communicator that lives, and a variable that outlives the call.
        checked(unsafe { ffi::MPI_Ibarrier(self.0, &raw mut request) })?;
        Ok(Request(request))
    }

    fn derived(
        self,
        make: impl FnOnce(*mut ffi::MPI_Comm) -> Result<(), String>,
    ) -> Result<Option<Self>, String> {
        // SAFETY: a constant of the library.
        let none = unsafe { ffi::RSMPI_COMM_NULL };
        let mut new = none;
        make(&raw mut new)?;
        if new == none {
            return Ok(None);
        }
        // SAFETY: a communicator that was just made, and a constant.
        checked(unsafe { ffi::MPI_Comm_set_errhandler(new, ffi::RSMPI_ERRORS_RETURN) })?;
        Ok(Some(Self(new)))
    }

    /// Gives the communicator back, collectively. No rank uses it any more.
    pub(super) fn free(self) -> Result<(), String> {
        let mut comm = self.0;
        // SAFETY: a communicator that lives; the handle is not used again.
        checked(unsafe { ffi::MPI_Comm_free(&raw mut comm) })
    }

    /// Begins to send `bytes` bytes, at most [`MAX_MESSAGE_BYTES`].
    ///
    /// # Safety
    /// They can be read, and nobody writes them, until the request is complete.
    pub(super) unsafe fn send(
        self,
        data: *const u8,
        bytes: usize,
        to: usize,
        tag: c_int,
    ) -> Result<Request, String> {
        let (count, to) = (int(bytes)?, int(to)?);
        // SAFETY: a constant of the library.
        let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
        // SAFETY: the caller's promise for the data; the communicator lives.
        checked(unsafe {
            ffi::MPI_Isend(
                data.cast::<c_void>(),
                count,
                ffi::RSMPI_UINT8_T,
                to,
                tag,
                self.0,
                &raw mut request,
            )
        })?;
        Ok(Request(request))
    }

    /// Begins to receive at most `bytes` bytes.
    ///
    /// # Safety
    /// They can be written, and nobody reads or writes them, until the request is complete.
    pub(super) unsafe fn receive(
        self,
        data: *mut u8,
        bytes: usize,
        from: usize,
        tag: c_int,
    ) -> Result<Request, String> {
        let (count, from) = (int(bytes)?, int(from)?);
        // SAFETY: a constant of the library.
        let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
        // SAFETY: the caller's promise for the data; the communicator lives.
        checked(unsafe {
            ffi::MPI_Irecv(
                data.cast::<c_void>(),
                count,
                ffi::RSMPI_UINT8_T,
                from,
                tag,
                self.0,
                &raw mut request,
            )
        })?;
        Ok(Request(request))
    }

    /// Looks for a message, from one rank or from any.
    pub(super) fn probe(self, from: Option<usize>, tag: c_int) -> Result<Option<Arrived>, String> {
        // SAFETY: a constant of the library.
        let from = from.map_or(Ok(unsafe { ffi::RSMPI_ANY_SOURCE }), int)?;
        let (mut found, mut status): (c_int, _) = (0, MaybeUninit::<ffi::MPI_Status>::uninit());
        // SAFETY: variables that outlive the call.
        checked(unsafe { ffi::MPI_Iprobe(from, tag, self.0, &raw mut found, status.as_mut_ptr()) })?;
        if found == 0 {
            return Ok(None);
        }
        // SAFETY: MPI fills the status of a message that it has found.
        let status = unsafe { status.assume_init() };
        Ok(Some(Arrived { source: status.MPI_SOURCE as usize, bytes: byte_count(&status)? }))
    }
}

impl Request {
    /// Whether it is complete, and with how many bytes (which means something for a receive only).
    /// A request that is complete is not tested again.
    pub(super) fn test(&mut self) -> Result<Option<usize>, String> {
        let (mut done, mut status): (c_int, _) = (0, MaybeUninit::<ffi::MPI_Status>::zeroed());
        // SAFETY: a request that MPI gave, and variables that outlive the call.
        checked(unsafe { ffi::MPI_Test(&raw mut self.0, &raw mut done, status.as_mut_ptr()) })?;
        if done == 0 {
            return Ok(None);
        }
        // SAFETY: MPI has filled the status; it was zeroed before, so a field left out is a number too.
        byte_count(&unsafe { status.assume_init() }).map(Some)
    }
}

fn byte_count(status: &ffi::MPI_Status) -> Result<usize, String> {
    let mut count: c_int = 0;
    // SAFETY: a status that MPI has filled, a constant, and a variable that outlives the call.
    checked(unsafe { ffi::MPI_Get_count(status, ffi::RSMPI_UINT8_T, &raw mut count) })?;
    // Of a send it may be undefined, which is negative.
    Ok(usize::try_from(count).unwrap_or(0))
}
