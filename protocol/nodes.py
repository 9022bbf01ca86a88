"""The link between the machines of a job: coordinators send their ranks' status to the first machine's coordinator.

    Reporter (PUB, connects) ── tcp, CURVE ──▶ Collector (SUB, binds)        status only, and in this direction only

CURVE encrypts, and both ends prove that they have the secret key of a public one that the other was given. Who has no
such key is not heard, and gets nothing. Nobody waits for the link: a reporter drops what a full or lost connection does
not take, and connects again by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import zmq

from protocol.address import Address
from protocol.channel import SOCKET_FRAME_BYTES
from protocol.codec import Envelope, WireError, decode, encode
from protocol.messages import Message
from protocol.quiet import rate_limited

HIGH_WATER_MARK: Final = 64
#: A connection that is silent for longer is closed, and a new one is made.
HEARTBEAT_MS: Final = 2_000
SILENCE_MS: Final = 10_000
RECONNECT_MS: Final = 200
MAX_RECONNECT_MS: Final = 5_000

_log = rate_limited(__name__)


class Keys:
    """A key pair of this process. Only `public` is for others; the secret key is never written, logged or sent."""

    def __init__(self) -> None:
        public, self._secret = zmq.curve_keypair()
        self.public: Final = public.decode()

    def put_on(self, socket: zmq.Socket[bytes]) -> None:
        socket.curve_publickey, socket.curve_secretkey = self.public.encode(), self._secret


def _prepare(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.MAXMSGSIZE, SOCKET_FRAME_BYTES)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)


class Collector:
    """The first machine's end. It listens at `endpoint` to whom `admit` has named.

    `host` is an address of this machine. The system chooses the port. Raises `ValueError` if it cannot listen there.
    """

    def __init__(self, keys: Keys, host: str) -> None:
        from zmq.auth.thread import ThreadAuthenticator  # imports asyncio

        self._token, self._admitted = keys.public, frozenset[bytes]()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(credentials_provider=self)
        self._socket = self._context.socket(zmq.SUB)
        try:
            _prepare(self._socket)
            keys.put_on(self._socket)
            self._socket.curve_server = True
            self._socket.setsockopt(zmq.SUBSCRIBE, b"")
            where = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
            self.endpoint: Final = f"{where}:{self._socket.bind_to_random_port(where)}"
        except zmq.ZMQError as error:
            self.close()
            raise ValueError(f"{host}: {error}") from None
        except BaseException:
            self.close()
            raise

    def admit(self, keys: Iterable[str]) -> None:
        """From now on, accept new connections of the owners of these public keys, and of nobody else."""
        self._admitted = frozenset(key.encode() for key in keys)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a connection may be made: the authenticator asks, on its own thread."""
        if key not in self._admitted:
            _log.warning("refused a connection: its key is of no machine of this job")
        return key in self._admitted

    def try_receive(self) -> Envelope | None:
        """The next message, or None if none has arrived."""
        while True:
            try:
                return decode(self._socket.recv(zmq.NOBLOCK), token=self._token)
            except zmq.Again:
                return None
            except WireError as error:
                _log.warning("dropped a message from another machine: %s", error)

    def close(self) -> None:
        self._socket.close(linger=0)
        self._authenticator.stop()
        self._context.term()


class Reporter:
    """Another machine's end: its connection to the collector at `endpoint`, whose public key is `key`.

    Raises `ValueError` if the endpoint or the key is none.
    """

    def __init__(self, keys: Keys, *, sender: Address, endpoint: str, key: str) -> None:
        self._token, self._sender, self._seq = key, sender, 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        try:
            _prepare(self._socket)
            self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
            self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
            keys.put_on(self._socket)
            self._socket.curve_serverkey = key.encode()
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ValueError(f"{endpoint}: {error}") from None

    def send(self, message: Message) -> None:
        """Send without waiting. Dropped while there is no connection, or if the collector does not read."""
        self._socket.send(encode(message, token=self._token, sender=self._sender, seq=self._seq), zmq.NOBLOCK)
        self._seq += 1

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()
