import socket

from scorepool.local.demo import free_port


def test_a_free_port_is_assigned_to_no_other_process_and_can_be_listened_on():
    found = {free_port() for _ in range(300)}

    others = set()
    for _ in range(1000):
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            others.add(other.getsockname()[1])

    assert len(found) == 300
    assert not found & others
    for port in found:
        socket.create_server(("127.0.0.1", port)).close()
