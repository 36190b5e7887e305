//! The MPI calls that the backend makes, with checked return codes.
//!
//! MPI is initialized for serialized calls from any thread: callers hold the world's lock.

use ::mpi::ffi;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;

/// Largest message: MPI counts are C `int`s.
pub(super) const MAX_MESSAGE_BYTES: usize = 1 << 30;

/// Largest tag that every MPI implementation supports.
pub(super) const MAX_TAG: c_int = 32_767;

/// A communicator: an ordered set of processes with its own message space.
#[derive(Debug, Clone, Copy)]
pub(super) struct Communicator(ffi::MPI_Comm);

// SAFETY: a handle that MPI allows on any thread; the world's lock serializes the calls.
unsafe impl Send for Communicator {}
// SAFETY: as above.
unsafe impl Sync for Communicator {}

/// A message in progress. MPI uses its buffer until a test reports that it is complete.
#[derive(Debug)]
pub(super) struct Request(ffi::MPI_Request);

// SAFETY: as for a communicator.
unsafe impl Send for Request {}

/// A message that has arrived and was not received yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Arrived {
    /// The sender's rank.
    pub(super) source: usize,
    pub(super) bytes: usize,
}

/// Converts an MPI return code.
fn checked(code: c_int) -> Result<(), String> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = [0_u8; ffi::MPI_MAX_ERROR_STRING as usize + 1];
    let mut length: c_int = 0;
    // SAFETY: the buffer has room for the longest message and its terminator.
    let described =
        unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &raw mut length) } == 0 && length > 0;
    let message = String::from_utf8_lossy(&text[..usize::try_from(length).unwrap_or(0).min(text.len())]);
    Err(if described { message.into_owned() } else { format!("error code {code}") })
}

/// Returns the number that a call of MPI sets; the variable outlives the call. A negative one is undefined, and counts as 0.
fn number(call: impl FnOnce(*mut c_int) -> c_int) -> Result<usize, String> {
    let mut number: c_int = 0;
    checked(call(&raw mut number))?;
    Ok(usize::try_from(number).unwrap_or(0))
}

/// Converts a number to C `int`.
fn int(number: usize) -> Result<c_int, String> {
    c_int::try_from(number).map_err(|_| format!("{number} exceeds the range of MPI counts"))
}

impl Communicator {
    /// The communicator of all processes of the job (`MPI_COMM_WORLD`).
    pub(super) fn world() -> Self {
        // SAFETY: a constant of the library.
        Self(unsafe { ffi::RSMPI_COMM_WORLD })
    }

    /// This process's rank.
    pub(super) fn rank(self) -> Result<usize, String> {
        // SAFETY: the communicator is valid.
        number(|rank| unsafe { ffi::MPI_Comm_rank(self.0, rank) })
    }

    /// Number of ranks.
    pub(super) fn size(self) -> Result<usize, String> {
        // SAFETY: the communicator is valid.
        number(|size| unsafe { ffi::MPI_Comm_size(self.0, size) })
    }

    /// Splits the communicator, collectively: blocks until all ranks have called it. Errors of the new communicator
    /// are returned as codes.
    pub(super) fn split(self, color: Option<usize>, key: usize) -> Result<Option<Self>, String> {
        // SAFETY: a constant of the library.
        let undefined = unsafe { ffi::RSMPI_UNDEFINED };
        let color = color.map_or(Ok(undefined), int)?;
        self.derived(|new| {
            let key = int(key)?;
            // SAFETY: the communicator is valid, and the variable outlives the call.
            checked(unsafe { ffi::MPI_Comm_split(self.0, color, key, new) })
        })
    }

    /// Returns the ranks that share this rank's memory. Collective.
    pub(super) fn split_by_host(self) -> Result<Option<Self>, String> {
        self.derived(|new| {
            // SAFETY: the communicator is valid, and the variable outlives the call.
            checked(unsafe {
                ffi::MPI_Comm_split_type(self.0, ffi::RSMPI_COMM_TYPE_SHARED, 0, ffi::RSMPI_INFO_NULL, new)
            })
        })
    }

    /// Starts a nonblocking barrier. Collective.
    pub(super) fn begin_barrier(self) -> Result<Request, String> {
        // SAFETY: the communicator is valid.
        Request::begin(|request| unsafe { ffi::MPI_Ibarrier(self.0, request) })
    }

    fn derived(
        self,
        create: impl FnOnce(*mut ffi::MPI_Comm) -> Result<(), String>,
    ) -> Result<Option<Self>, String> {
        // SAFETY: a constant of the library.
        let none = unsafe { ffi::RSMPI_COMM_NULL };
        let mut new = none;
        create(&raw mut new)?;
        if new == none {
            return Ok(None);
        }
        // SAFETY: the communicator was just created; the other argument is a constant.
        checked(unsafe { ffi::MPI_Comm_set_errhandler(new, ffi::RSMPI_ERRORS_RETURN) })?;
        Ok(Some(Self(new)))
    }

    /// Frees the communicator, collectively. It must not be used afterwards.
    pub(super) fn free(self) -> Result<(), String> {
        let mut comm = self.0;
        // SAFETY: the communicator is valid, and the handle is not used again.
        checked(unsafe { ffi::MPI_Comm_free(&raw mut comm) })
    }

    /// Starts to send `bytes` bytes, at most [`MAX_MESSAGE_BYTES`].
    ///
    /// # Safety
    /// The bytes must stay readable and unchanged until the request is complete.
    pub(super) unsafe fn send(
        self,
        data: *const u8,
        bytes: usize,
        to: usize,
        tag: c_int,
    ) -> Result<Request, String> {
        let (data, count, to) = (data.cast::<c_void>(), int(bytes)?, int(to)?);
        // SAFETY: guaranteed by the caller for the data; the communicator is valid.
        Request::begin(|request| unsafe {
            ffi::MPI_Isend(data, count, ffi::RSMPI_UINT8_T, to, tag, self.0, request)
        })
    }

    /// Starts to receive at most `bytes` bytes.
    ///
    /// # Safety
    /// The bytes must stay writable, and must not be accessed, until the request is complete.
    pub(super) unsafe fn receive(
        self,
        data: *mut u8,
        bytes: usize,
        from: usize,
        tag: c_int,
    ) -> Result<Request, String> {
        let (data, count, from) = (data.cast::<c_void>(), int(bytes)?, int(from)?);
        // SAFETY: guaranteed by the caller for the data; the communicator is valid.
        Request::begin(|request| unsafe {
            ffi::MPI_Irecv(data, count, ffi::RSMPI_UINT8_T, from, tag, self.0, request)
        })
    }

    /// Looks for a message from one rank or from any rank.
    pub(super) fn probe(self, from: Option<usize>, tag: c_int) -> Result<Option<Arrived>, String> {
        // SAFETY: a constant of the library.
        let from = from.map_or(Ok(unsafe { ffi::RSMPI_ANY_SOURCE }), int)?;
        let (mut found, mut status): (c_int, _) = (0, MaybeUninit::<ffi::MPI_Status>::uninit());
        // SAFETY: the variables outlive the call.
        checked(unsafe { ffi::MPI_Iprobe(from, tag, self.0, &raw mut found, status.as_mut_ptr()) })?;
        if found == 0 {
            return Ok(None);
        }
        // SAFETY: MPI fills the status of a message that it found.
        let status = unsafe { status.assume_init() };
        Ok(Some(Arrived { source: status.MPI_SOURCE as usize, bytes: byte_count(&status)? }))
    }
}

impl Request {
    /// Starts an operation by a call of MPI that sets the request, which outlives the call.
    fn begin(call: impl FnOnce(*mut ffi::MPI_Request) -> c_int) -> Result<Self, String> {
        // SAFETY: a constant of the library.
        let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
        checked(call(&raw mut request))?;
        Ok(Self(request))
    }

    /// Returns the number of bytes once the request is complete (meaningful for a receive only).
    /// A completed request must not be tested again.
    pub(super) fn test(&mut self) -> Result<Option<usize>, String> {
        let (mut done, mut status): (c_int, _) = (0, MaybeUninit::<ffi::MPI_Status>::zeroed());
        // SAFETY: the request comes from MPI, and the variables outlive the call.
        checked(unsafe { ffi::MPI_Test(&raw mut self.0, &raw mut done, status.as_mut_ptr()) })?;
        if done == 0 {
            return Ok(None);
        }
        // SAFETY: MPI has filled the status, which was zeroed before, so unset fields are valid too.
        byte_count(&unsafe { status.assume_init() }).map(Some)
    }
}

fn byte_count(status: &ffi::MPI_Status) -> Result<usize, String> {
    // SAFETY: MPI has filled the status. For a send the count may be undefined.
    number(|count| unsafe { ffi::MPI_Get_count(status, ffi::RSMPI_UINT8_T, count) })
}
