import socket
import threading
import time
from contextlib import suppress

from shared.unread import end_connection
from tests.waiting import PATIENCE


def test_a_peer_that_is_sending_is_told_at_once_that_its_connection_has_ended() -> None:
    """Without a reset, one in three would wait for room that nobody makes."""
    ends = []
    for trial in range(30):
        with socket.create_server(("127.0.0.1", 0)) as server:
            sender = socket.create_connection(server.getsockname(), timeout=PATIENCE)
            receiver, _ = server.accept()
        thread = threading.Thread(target=lambda sender=sender: ends.append(send_until_ended(sender)))
        thread.start()
        time.sleep(0.001 * (trial % 10))
        with receiver:
            end_connection(receiver)
            with suppress(ConnectionError):  # the sender may have answered with a reset
                while receiver.recv(1 << 16):  # as libzmq does before it closes
                    pass
        thread.join()
    assert ends == [ConnectionError] * 30


def send_until_ended(sender: socket.socket) -> type[OSError]:
    """Send until the connection ends, close it, and return the kind of the error."""
    with sender:
        try:
            while True:
                sender.sendall(bytes(1 << 20))
        except ConnectionError:
            return ConnectionError
        except TimeoutError:
            return TimeoutError
