use super::*;

const HOST: &str = "127.0.0.1";
const PATIENT: Duration = Duration::from_secs(20);
const BRIEF: Duration = Duration::from_millis(60);
const ID: Id = [7; ID_BYTES];

/// A port that was free a moment ago.
fn free_port() -> u16 {
    TcpListener::bind((HOST, 0)).unwrap().local_addr().unwrap().port()
}

pub(super) fn point(port: u16, world_size: usize) -> MeetingPoint {
    let secret = JobSecret::new("a secret of these tests", true);
    MeetingPoint { host: HOST.into(), port, bind: None, world_size, is_one_node: true, secret }
}

/// A connection to rank 0, which may not listen yet.
fn connect(port: u16) -> TcpStream {
    loop {
        match TcpStream::connect((HOST, port)) {
            Ok(stream) => return stream,
            Err(_) => std::thread::sleep(RETRY),
        }
    }
}

/// Why rank 0 refuses a process.
fn refusal(point: &MeetingPoint, rank: usize) -> String {
    fetch(point, rank, PATIENT).unwrap_err().to_string()
}

#[test]
fn all_ranks_get_the_id_of_rank_0_whoever_comes_first() {
    let point = point(free_port(), 4);
    let named = MeetingPoint { host: "localhost".into(), ..point.clone() };
    let id: Id = std::array::from_fn(|i| i as u8 ^ 0x5a);
    std::thread::scope(|scope| {
        let early = scope.spawn(|| fetch(&point, 1, PATIENT));
        let root = scope.spawn(|| hand_out(&id, &point, PATIENT));
        let late = [2, 3].map(|rank| {
            scope.spawn({
                let named = &named;
                move || fetch(named, rank, PATIENT)
            })
        });
        assert_eq!(early.join().unwrap().unwrap().0, id);
        late.into_iter().for_each(|rank| assert_eq!(rank.join().unwrap().unwrap().0, id));
        let connections = root.join().unwrap().unwrap();
        assert_eq!(connections.into_keys().collect::<Vec<_>>(), [1, 2, 3], "which stay");
    });
}

#[test]
fn a_stranger_gets_nothing_and_takes_no_ranks_place() {
    let point = point(free_port(), 2);
    std::thread::scope(|scope| {
        let root = scope.spawn(|| hand_out(&ID, &point, PATIENT));
        let mut stranger = connect(point.port);
        stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let mut answer = Vec::new();
        // Closed with bytes unread, a connection ends with an error.
        let _ = stranger.read_to_end(&mut answer);
        assert!(answer.is_empty(), "{answer:?}");
        assert_eq!(fetch(&point, 1, PATIENT).unwrap().0, ID);
        root.join().unwrap().unwrap();
    });
}

#[test]
fn a_process_without_the_secret_gets_no_id_and_no_rank() {
    let point = point(free_port(), 2);
    let guess = MeetingPoint { secret: JobSecret::new("another secret", true), ..point.clone() };
    std::thread::scope(|scope| {
        let root = scope.spawn(|| hand_out(&ID, &point, PATIENT));
        assert!(refusal(&guess, 1).contains("ULYSSES_JOB_SECRET must be the same for all ranks"));
        // Who knows the protocol, but not the secret.
        let mut stranger = connect(point.port);
        stranger.write_all(&hello(&[1; 32])).unwrap();
        let mut root_nonce = Nonce::default();
        stranger.read_exact(&mut root_nonce).unwrap();
        let claim = Claim { rank: 1, world_size: 2 };
        let session = Session { secret: &guess.secret, root: root_nonce, peer: [1; 32] };
        stranger.write_all(&session.claim(claim)).unwrap();
        let mut answer = Vec::new();
        stranger.read_to_end(&mut answer).unwrap();
        assert_eq!(answer, OTHER_SECRET);
        assert_eq!(fetch(&point, 1, PATIENT).unwrap().0, ID);
        root.join().unwrap().unwrap();
    });
}

#[test]
fn a_rank_takes_no_id_from_who_has_not_the_secret() {
    let listener = TcpListener::bind((HOST, 0)).unwrap();
    let point = point(listener.local_addr().unwrap().port(), 2);
    let stranger = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.read_exact(&mut [0; HELLO_BYTES]).unwrap();
        stream.write_all(&[2; 32]).unwrap();
        stream.read_exact(&mut [0; CLAIM_BYTES]).unwrap();
        stream.write_all(&[0; REPLY_BYTES]).unwrap();
    });
    assert!(refusal(&point, 1).contains("another job has this port"));
    stranger.join().unwrap();
}

#[test]
fn ranks_that_are_out_of_range_or_taken_are_refused_by_name() {
    let point = point(free_port(), 3);
    std::thread::scope(|scope| {
        let root = scope.spawn(|| hand_out(&ID, &point, PATIENT));
        for rank in [3, usize::MAX] {
            let expected = format!("rank {rank} is out of range: the job has ranks 0 to 2");
            assert!(refusal(&point, rank).contains(&expected));
        }
        assert!(refusal(&point, 0).contains("rank 0 is taken"));
        let larger = MeetingPoint { world_size: 4, ..point.clone() };
        assert!(refusal(&larger, 2).contains("rank 2 counts 4 ranks, but rank 0 counts 3"));
        let (_, first) = fetch(&point, 1, PATIENT).unwrap();
        assert!(refusal(&point, 1).contains("rank 1 is taken: two processes have the same rank"));
        drop(first);
        let _again = fetch(&point, 1, PATIENT).unwrap();
        fetch(&point, 2, PATIENT).unwrap();
        assert_eq!(root.join().unwrap().unwrap().into_keys().collect::<Vec<_>>(), [1, 2]);
    });
}

#[test]
fn a_rank_0_that_waits_in_vain_says_whom_it_has_refused() {
    let point = point(free_port(), 2);
    std::thread::scope(|scope| {
        let root = scope.spawn(|| hand_out(&ID, &point, Duration::from_millis(500)));
        assert!(refusal(&point, 9).contains("out of range"));
        let error = root.join().unwrap().unwrap_err().to_string();
        assert!(
            error.contains("ranks {1} did not come") && error.contains("rank 9 is out of range"),
            "{error}"
        );
    });
}

#[test]
fn silent_connections_do_not_hold_up_the_ranks() {
    let point = point(free_port(), 2);
    std::thread::scope(|scope| {
        let root = scope.spawn(|| hand_out(&ID, &point, PATIENT));
        let mut silent: Vec<TcpStream> = (0..10).map(|_| connect(point.port)).collect();
        // Half of them begin and stop.
        silent.iter_mut().step_by(2).for_each(|stream| stream.write_all(&MAGIC[..3]).unwrap());
        assert_eq!(fetch(&point, 1, PATIENT).unwrap().0, ID);
        root.join().unwrap().unwrap();
        silent
            .iter_mut()
            .for_each(|stream| assert!(!matches!(stream.read(&mut [0]), Ok(1..)), "they get nothing"));
    });
}

#[test]
fn a_connection_is_closed_at_its_deadline() {
    let listener = TcpListener::bind((HOST, 0)).unwrap();
    let point = point(listener.local_addr().unwrap().port(), 2);
    let mut silent = connect(point.port);
    let (stream, from) = listener.accept().unwrap();
    let mut reception = Reception::new(&ID, &point);
    reception.pending.extend(Pending::new(stream, from));
    reception.serve();
    assert_eq!(reception.pending.len(), 1);
    reception.pending[0].deadline = Instant::now();
    reception.serve();
    assert_eq!(reception.pending.len(), 0);
    assert_eq!(silent.read(&mut [0]).unwrap(), 0);
}

#[test]
fn too_many_strangers_push_out_the_oldest() {
    let listener = TcpListener::bind((HOST, 0)).unwrap();
    listener.set_nonblocking(true).unwrap();
    let point = point(listener.local_addr().unwrap().port(), 2);
    let mut reception = Reception::new(&ID, &point);
    let mut strangers = Vec::new();
    for _ in 0..MAX_STRANGERS + 2 {
        strangers.push(connect(point.port));
        reception.accept(&listener);
    }
    let addresses = |peers: &[Pending]| peers.iter().map(|peer| peer.from).collect::<Vec<_>>();
    let oldest = strangers[0].local_addr().unwrap();
    assert!(addresses(&reception.pending).contains(&oldest));
    strangers.push(connect(point.port));
    reception.accept(&listener);
    assert!(!addresses(&reception.pending).contains(&oldest));
    assert_eq!(reception.pending.len(), MAX_STRANGERS + 2);
}

#[test]
fn who_waits_in_vain_is_told_for_whom() {
    let point = point(free_port(), 3);
    let error = fetch(&point, 2, BRIEF).unwrap_err();
    assert!(matches!(error, CommError::Start { rank: Some(2), .. }), "{error}");
    let error = hand_out(&ID, &point, BRIEF).unwrap_err();
    assert!(error.to_string().contains("ranks {1, 2} did not come"), "{error}");
}

#[test]
fn a_port_in_use_is_named() {
    let taken = TcpListener::bind((HOST, 0)).unwrap();
    let port = taken.local_addr().unwrap().port();
    let error = hand_out(&ID, &point(port, 2), BRIEF).unwrap_err().to_string();
    assert!(error.contains(&format!("cannot listen on port {port}")), "{error}");
}
