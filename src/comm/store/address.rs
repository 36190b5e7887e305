//! The address that the host listens on.

use super::StoreEndpoint;
use std::io::{Error, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};

/// Listens on the endpoint's own address where this machine can tell, and otherwise on all addresses.
pub(super) fn listen(point: &StoreEndpoint) -> std::io::Result<TcpListener> {
    let mut outcome = Err(Error::new(ErrorKind::AddrNotAvailable, "not an address of this machine"));
    for address in addresses(point) {
        outcome = TcpListener::bind(SocketAddr::new(address, point.port));
        match &outcome {
            Err(error) if error.kind() == ErrorKind::AddrNotAvailable => {}
            _ => break,
        }
    }
    outcome
}

/// Addresses to listen on; the first one that belongs to this machine is used.
///
/// `ULYSSES_MASTER_BIND`, an IP address and `localhost` are used as given. Other names may resolve differently on other
/// nodes (a service, a router), and on this machine to its loopback, as Debian's `127.0.1.1` does. With such a name,
/// and only then, rank 0 listens on all addresses.
fn addresses(point: &StoreEndpoint) -> Vec<IpAddr> {
    let StoreEndpoint { host, port, bind, is_one_node, .. } = point;
    if let Some(given) = bind.or_else(|| host.parse().ok()) {
        return vec![given];
    }
    let known: Vec<IpAddr> = (host.as_str(), *port)
        .to_socket_addrs()
        .map(|known| known.map(|address| address.ip()).collect())
        .unwrap_or_default();
    if *is_one_node || host == "localhost" {
        return known;
    }
    let all = match known.first() {
        Some(IpAddr::V6(_)) => Ipv6Addr::UNSPECIFIED.into(),
        _ => Ipv4Addr::UNSPECIFIED.into(),
    };
    known.into_iter().filter(|address| !address.is_loopback()).chain([all]).collect()
}

#[cfg(test)]
mod tests {
    use super::super::tests::point;
    use super::*;

    fn of(host: &str, bind: Option<&str>, is_one_node: bool) -> Vec<IpAddr> {
        let bind = bind.map(|address| address.parse().unwrap());
        addresses(&StoreEndpoint { host: host.into(), bind, is_one_node, ..point(0, 2) })
    }

    #[test]
    fn rank_0_listens_on_the_configured_address() {
        let loopback = IpAddr::from(Ipv4Addr::LOCALHOST);
        assert_eq!(of("127.0.0.1", None, false), [loopback]);
        assert_eq!(of("192.0.2.7", None, false), ["192.0.2.7".parse::<IpAddr>().unwrap()]);
        assert_eq!(of("::1", None, false), [IpAddr::from(Ipv6Addr::LOCALHOST)]);
        assert_eq!(of("192.0.2.7", Some("127.0.0.1"), false), [loopback]);
        assert_eq!(of("n0", Some("0.0.0.0"), true), [IpAddr::from(Ipv4Addr::UNSPECIFIED)]);
        assert!(!of("localhost", None, false).is_empty());
        assert!(of("localhost", None, false).iter().all(IpAddr::is_loopback));
    }

    #[test]
    fn a_name_that_is_not_an_address_of_this_machine_means_all_addresses() {
        // RFC 6761: this host does not exist.
        assert_eq!(of("n0.invalid", None, false), [IpAddr::from(Ipv4Addr::UNSPECIFIED)]);
        assert!(of("n0.invalid", None, true).is_empty(), "unless all ranks are on this machine");
    }

    #[test]
    fn the_socket_is_bound_to_the_configured_address_only() {
        let listener = listen(&StoreEndpoint { host: "127.0.0.1".into(), ..point(0, 2) }).unwrap();
        assert_eq!(listener.local_addr().unwrap().ip(), IpAddr::from(Ipv4Addr::LOCALHOST));
    }
}
