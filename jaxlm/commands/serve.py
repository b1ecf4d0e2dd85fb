"""`jaxlm serve`: answers over HTTP with the model of a run."""

import argparse
import contextlib
import importlib.util
import os
import pathlib
import signal
import socket

from jaxlm.config import Config, ConfigError, pip_install
from jaxlm.data.chats import chat
from jaxlm.devices.processes import say
from jaxlm.eval import model
from jaxlm.interop import peft
from jaxlm.serve import address

_NEEDS = ("starlette", "uvicorn", "sse_starlette")


def run(config: Config, args: argparse.Namespace) -> int:
    """Serves until ctrl-C or SIGTERM, then ends open streams and returns 0."""
    _check(config, args)
    from jaxlm.serve import guard
    from jaxlm.serve.batcher import running

    key = args.api_key if args.api_key is not None else os.environ.get("JAXLM_API_KEY", "")
    read = model.opener(config, args.checkpoint, peft.READERS, args.words)  # first: most refusals take no port
    with address.listen(args.host, args.port) as listening:
        if not key and not guard.is_loopback(args.host):
            say(f"anyone who reaches {args.host} can use this server: --api-key=KEY asks for a key")
        restored = model.with_weights(config, read())
        del read  # it holds what was read of the adapters
        sizes = {"rows": args.rows, "queue": args.queue}
        with running(restored.model, restored.variables, restored.mesh, **sizes) as batcher:
            _serve(_server(args, restored, batcher, key), listening)
    return 0


def _check(config: Config, args: argparse.Namespace) -> None:
    missing = [name.replace("_", "-") for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"jaxlm serve needs {', '.join(missing)}: {pip_install('serve')}")
    model.check_run(config, args.config)
    if config.distributed.num_processes > 1:
        raise ConfigError("jaxlm serve runs in one process: start it without distributed.num_processes")
    for flag, value, least in (("rows", args.rows, 1), ("queue", args.queue, 0), ("max-prompt", args.max_prompt, 0)):
        if value < least:
            raise ConfigError(f"--{flag}={value} must be at least {least}")


def _server(args: argparse.Namespace, restored: model.Restored, batcher, key: str):
    from jaxlm.serve import guard, guide, http, requests

    size, context = restored.model.config.vocab_size, restored.model.config.max_seq_len

    def reader(tokenizer, adapter: int = 0):
        ends = chat.ends(tokenizer)
        guides = guide.Guides(tokenizer, size, ends)
        return requests.Reader(tokenizer, size, context, ends, guides, args.max_prompt, adapter=adapter)

    limits = http.Limits(window=args.rows, here=not key and guard.is_loopback(args.host))
    name = pathlib.Path(args.config).resolve().name
    tokenizers = {name: restored.tokenizer, **restored.beside}
    readers = {each: reader(tokenizer, number) for number, (each, tokenizer) in enumerate(tokenizers.items())}
    return http.Server(readers, batcher, limits, key)


def _serve(server, listening: socket.socket) -> None:
    import uvicorn

    from jaxlm.serve.guard import Arriving

    quiet = {"log_config": None, "log_level": "critical", "access_log": False, "server_header": False}
    settings = uvicorn.Config(server.app(), http=Arriving, timeout_graceful_shutdown=2, **quiet)
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # uvicorn ends, then raises the signal again
    say(f"serving {server.name} at {address.url(listening)} (ctrl-C ends it)")
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(settings).run([listening])
