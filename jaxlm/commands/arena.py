"""`jaxlm arena A B ...`: people vote blindly between the answers of runs, servers or files of samples."""

import argparse
import dataclasses
import json
import pathlib

from jaxlm import config as config_lib
from jaxlm.config import Config, ConfigError
from jaxlm.host.console import say, table, working
from jaxlm.serve import address
from jaxlm.serve.arena import contestants, page
from jaxlm.serve.arena.contestants import Contestant
from jaxlm.serve.arena.store import Store, write_pairs, write_votes


def run(config: Config, args: argparse.Namespace) -> int:
    """Generates missing answers and opens the page; or prints results, or exports votes."""
    reads = args.results or args.export_votes or args.export_pairs
    path = pathlib.Path(args.store).expanduser()
    if not path.is_file() and (reads or not args.words):
        raise ConfigError(f"no votes in {path}: jaxlm arena RUN_A RUN_B begins (--store=FILE names another file)")
    if args.json and not args.results:
        raise ConfigError("--json needs --results: jaxlm arena --results --json")
    if not reads:
        page.check()
    playing = [_settled(contestants.parse(word)) for word in args.words]
    named = contestants.names(playing)
    if len(playing) == 1:
        raise ConfigError("one contestant alone: name two or more, jaxlm arena RUN_A RUN_B")
    store = Store(path)
    try:
        ids = store.enter(named) if playing else store.enter_all()
        if reads:
            return _read(store, args)
        with address.listen(args.host, args.port) as listening:
            _answer(store, dict(zip(ids, playing, strict=False)), config, args)
            say(f"vote at {address.url(listening)} (ctrl-C ends; the same command resumes)")
            try:
                page.serve(store, listening, not args.no_reveal)
            except KeyboardInterrupt:
                say(f"{len(store.votes()):,} votes in {path}: jaxlm arena --results --store={path}")
        return 0
    finally:
        store.close()


def _settled(player: Contestant) -> Contestant:
    """Returns a run with its checkpoint's step fixed, since a run that trains on is another contestant; others unchanged."""
    if player.kind != "run":
        return player
    from jaxlm.eval import model  # late, as everything that imports JAX, so that votes are read without it
    from jaxlm.interop import peft
    from jaxlm.train import origin

    if not model.is_there(player.where):
        raise ConfigError(f"{player.where} is no run, no model, no file of samples and no URL: who should take part?")
    step = origin.open(player.where, player.which, peft.READERS).provenance.get("step")
    return dataclasses.replace(player, which="" if step is None else str(step))


def _answer(store: Store, playing: dict[int, Contestant], config: Config, args: argparse.Namespace) -> None:
    sampled = {i: contestants.read_samples(player.where) for i, player in playing.items() if player.kind == "file"}
    configs = {i: _config(player, args.overrides) for i, player in playing.items() if player.kind == "run"}
    if args.prompts:
        prompts = contestants.read_prompts(args.prompts)
    elif sampled:
        prompts = [*dict.fromkeys(prompt for texts in sampled.values() for prompt in texts)]
    else:
        prompts = [*next(iter(configs.values()), config).sample.prompts]
    for number, player in playing.items():
        missing = store.missing(number, prompts)
        if player.kind == "file":
            store.answer(number, {prompt: sampled[number][prompt] for prompt in missing if prompt in sampled[number]})
        elif player.kind == "server":
            with working(f"asking {player.where}", len(missing), "prompts") as tell:
                for at, prompt in enumerate(missing, 1):
                    store.answer(number, {prompt: contestants.ask(player, prompt, config.sample, config.seed)})
                    tell(at)
        elif missing:
            store.answer(number, _continued(player, configs[number], missing))
    if playing and not store.battles():
        raise ConfigError(
            "nothing to vote on: no prompt has two answers that differ; give other prompts, --prompts=FILE"
        )


def _config(player: Contestant, overrides: list[str]) -> Config:
    from jaxlm.interop import inherit

    own = [override for override in overrides if not override.startswith("workdir=")]
    return config_lib.resolve(inherit.of_folder(str(pathlib.Path(player.where).resolve()), own))


def _continued(player: Contestant, config: Config, prompts: list[str]) -> dict[str, str]:
    import jax

    from jaxlm.eval import model, samples
    from jaxlm.interop import peft

    run = model.restore(config, player.which or "latest", peft.READERS)
    with jax.set_mesh(run.mesh), working(f"{player.name} answers {len(prompts):,} prompts"):
        texts = samples.continue_prompts(run.model, run.variables, run.tokenizer, prompts, config.sample, config.seed)
    return dict(zip(prompts, texts, strict=True))


def _read(store: Store, args: argparse.Namespace) -> int:
    votes, names = store.votes(), store.names()
    if args.export_votes:
        say(f"{write_votes(pathlib.Path(args.export_votes), votes, names):,} votes in {args.export_votes}")
    if args.export_pairs:
        say(f"{write_pairs(pathlib.Path(args.export_pairs), votes):,} pairs in {args.export_pairs}")
    if not args.results:
        return 0
    if not votes:
        raise ConfigError("no votes yet: jaxlm arena RUN_A RUN_B opens the page on which people vote")
    from jaxlm.serve.arena import ratings

    results = ratings.results(votes, names)
    lines = ratings.words(results)
    if args.json:
        gaps = [dataclasses.asdict(gap) | {"apart": gap.apart} for gap in results.gaps]
        biases = [dataclasses.asdict(bias) | {"found": bias.found} for bias in results.biases]
        agreement = results.agreement and results.agreement._asdict()
        both = {"gaps": gaps, "biases": biases, "agreement": agreement, "words": lines}
        print(json.dumps(dataclasses.asdict(results) | both))
        return 0
    people, ties = "person" if results.raters == 1 else "people", "tie" if results.ties == 1 else "ties"
    print(f"{results.votes:,} votes by {results.raters:,} {people}, {results.ties:,} {ties}")
    rows = [["", "votes", "Bradley-Terry, 95%", "Elo, 95%"]]
    for rating in results.ratings:
        elo = f"{rating.elo:,.0f}, {rating.elo_low:,.0f} to {rating.elo_high:,.0f}"
        rows.append(
            [rating.name, f"{rating.votes:,}", f"{rating.rating:+.0f}, {rating.low:+.0f} to {rating.high:+.0f}", elo]
        )
    print(table(rows, right=(1,)))
    print("\n".join(lines))
    return 0
