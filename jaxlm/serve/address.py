"""The address at which a server listens."""

import errno
import socket

from jaxlm.config import ConfigError, RunError


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens at an address of this machine; port 0 takes any free port.

    Clients that connect wait until a server uses the socket. So two servers that start together do not both get the port.

    Raises:
      RunError: the port is in use.
      ConfigError: the address is not this machine's, or this user may not use the port.
    """
    if not 0 <= port < 2**16:
        raise ConfigError(f"--port={port} must be from 0 to 65535")
    made = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(2048)
    except OSError as error:
        if made:
            made.close()
        if error.errno == errno.EADDRINUSE:
            raise RunError(f"port {port} of {host} is in use: end that program, or take --port=0") from None
        if error.errno == errno.EACCES:
            raise ConfigError(f"port {port} is not for ordinary users: --port=8000") from None
        raise ConfigError(f"can't listen at {host}: {error.strerror}; --host=127.0.0.1 is this machine") from None
    return made


def url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
