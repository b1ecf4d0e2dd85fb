"""Every key with its default and a comment; an experiment imports this file, changes what it must, and nothing else.

`jaxlm train --help=SECTION` prints the comments. A key's type, bounds and choices stand in jaxlm/config/schema.py.
0 or an empty string means "derive it" where the comment says so.
"""

from ml_collections import ConfigDict

from jaxlm.configs import stages


def get_config() -> ConfigDict:
    """A new ConfigDict with all defaults."""
    c = ConfigDict()
    c.program = "pretrain"  # the program that `jaxlm train` and `python -m jaxlm.main` run
    c.workdir = ""  # folder of this run: checkpoints, metrics, samples; required to train
    c.seed = 0  # initial weights, order of rows, dropout and samples all follow from it
    c.origin = ""  # the folder of a run whose weights this one begins with; "" = new weights
    c.origin_checkpoint = "latest"  # of the origin: latest, best or a step
    c.origin_state = False  # True: begin with the origin's optimizer state, step and order of batches too (a branch)
    c.origin_merge = True  # False: an origin that is a LoRA is not merged, and the same adapter is trained on
    _model(c)
    _data(c)
    _train(c)
    _posttraining(c)
    _reinforcement(c)
    _outputs(c)
    _runs(c)
    _machine(c)
    _prepare(c)
    return c


def _model(c: ConfigDict) -> None:
    """The network."""
    c.model = m = ConfigDict()  # the network
    m.family = "llama"  # architecture
    m.n_layers = 8  # transformer blocks
    m.d_model = 512  # width: size of the embeddings and of the residual stream
    m.n_heads = 8  # query heads
    m.n_kv_heads = 0  # key-value heads (GQA); 0 = n_heads
    m.head_dim = 0  # 0 = d_model / n_heads
    m.d_ff = 1408  # inner size of the MLP
    m.vocab_size = 0  # of the tokenizer, chat tokens included; 0 = the data's own, or chosen by the amount of text
    m.max_seq_len = 0  # learned positions of gpt2, longest context written to exports; 0 = train.seq_len
    m.tie_embeddings = True  # one matrix for input embedding and output head
    m.bias = False  # biases in projections (llama: attention and MLP; gpt2 has them always as published)
    m.qkv_bias = False  # biases on queries, keys and values alone, as in Qwen2 (llama)
    m.qk_norm = False  # RMSNorm on queries and keys per head
    m.norm_eps = 1e-5  # added to the variance in each norm
    m.rope = ConfigDict()  # rotary positions (llama)
    m.rope.theta = 10000.0  # base of the angles
    m.rope.scaling = "none"  # how a longer context than the trained one is reached
    m.rope.factor = 1.0  # context is stretched by this (linear, llama3)
    m.rope.low_freq_factor = 1.0  # llama3 only
    m.rope.high_freq_factor = 4.0  # llama3 only
    m.rope.original_max_len = 8192  # llama3 only: context before stretching
    m.dropout = 0.0  # on embeddings and on each residual branch
    m.init_std = 0.02  # of normal initial weights; output projections divided by sqrt(2 n_layers)
    m.dtype = "auto"  # of computation; auto: float32 on CPU, else bfloat16; parameters and loss are always float32
    m.attention = "auto"  # blocked: CPU; cudnn, cudnn_packed, tokamax: GPU; pallas: GPU, TPU; auto: logged
    m.remat = "none"  # what the backward pass recomputes, in order of memory saved; auto = the least that fits
    m.scan_layers = False  # True: compile one layer and scan it (deep models, TPU); False: unroll (fastest on one GPU)
    m.fuse_projections = True  # q, k, v in one product and gate, up in one; the parameters stay apart
    m.fp8 = False  # products of the MLP in float8 (e4m3, gradients e5m2; scaled by tensor): Hopper, Ada or newer
    m.offload = False  # what `remat=names` keeps waits for the backward pass in host memory


def _data(c: ConfigDict) -> None:
    """Where tokens come from, and how they reach the step."""
    c.data = d = ConfigDict()  # texts, tokenizer, shards, loader
    d.dir = ""  # folder of tokenizer, shards and manifest; made when absent; "" = WORKDIR/data
    d.path = ""  # train on this one folder, file, glob or tfds:NAME; takes the place of `sources`
    d.sources = ConfigDict()  # NAME -> path (folder, file, glob, tfds:NAME, embedded:NAME; "" = in data.dir), weight
    d.final = ConfigDict()  # other weights at the end of a run, for the best data
    d.final.share = 0.0  # the last share of optim.schedule_steps has them (wsd decays in the last 0.2); 0 = none
    d.final.weights = ConfigDict()  # NAME -> weight; sources that are not named keep theirs. A branch has them at once
    d.text_key = "text"  # the field that holds the text, in jsonl, parquet and TFDS
    d.max_bytes = 0  # read at most this many bytes of text from each source; 0 = all
    d.tfds_dir = ""  # folder of TFDS datasets; "" = TFDS's own default
    d.hub_dir = ""  # folder that holds hub datasets as REPOSITORY/*.parquet or .jsonl; "" = from the hub
    d.tokenizer = ""  # a SentencePiece .model to use; "" = one is trained on the sources
    d.tokenizer_model = "bpe"  # the kind of tokenizer that is trained
    d.chat_tokens = False  # the last five ids of the vocabulary are the ChatML tokens
    d.val_fraction = 0.01  # of documents, held out by a hash of their content
    d.seed = -1  # chooses the held-out documents and trains the tokenizer; -1 = as in the manifest, 0 for new data
    d.block_tokens = 8192  # tokens per ArrayRecord record
    d.num_threads = 4  # of the loader; batches do not depend on it
    d.num_workers = 0  # processes of the loader; 0 = threads only; batches do not depend on it
    d.prefetch = 8  # batches made ahead of the step
    d.timeout_s = 300.0  # a batch that takes longer than this is an error, not a silent wait


def _posttraining(c: ConfigDict) -> None:
    """Adapters, chats and pairs: what sft, reward and dpo read beside the other sections."""
    c.adapter = a = ConfigDict()  # LoRA, QLoRA, prompt tuning; trained in place of the model's parameters
    a.kind = "none"  # none: all parameters; lora (arXiv:2106.09685); prompt: vectors in front (arXiv:2104.08691)
    a.rank = 16  # lora
    a.alpha = 32.0  # lora: its product is multiplied by alpha / rank
    a.rslora = False  # lora: by alpha / sqrt(rank) (arXiv:2312.03732)
    a.dropout = 0.0  # lora: of what goes into A
    a.targets = (r"attn/[qkvo]", r"mlp/(gate|up|down)")  # lora: kernels of each layer (full match); these are all
    a.rows = ("auto",)  # tokens whose rows of embedding and head are trained too; auto: ChatML's, if the model is ours
    a.without_rows = False  # True: train an adapter although the rows of ChatML's tokens stay as they are
    a.quantize = "none"  # the frozen parameters' layers: nf4 in blocks of 64 (QLoRA, arXiv:2305.14314), int8
    a.prompt_tokens = 20  # prompt: how many vectors
    a.prompt_text = ""  # prompt: they begin as the embeddings of this text; "" = drawn from the embedding's rows

    c.examples = e = ConfigDict()  # chats and pairs; of data.path: a jsonl, json or parquet file, or a folder
    e.format = "auto"  # auto: by the keys; prompt: prompt and response; hh: transcripts; pairs: chosen and rejected
    e.val_path = ""  # held-out examples; "" = data.val_fraction of the others, by a hash of their content
    e.template = (
        ""  # for a hub base without one: chatml (teaches its two tokens), plain (User: ... Assistant: ...), a file
    )
    e.benchmarks = ""  # folder of benchmark files; examples that hold one of their items are named
    e.ignore = ()  # keys of rows and messages that are read as if they were not there, such as label
    e.last_only = False  # True: of each chat the last answer alone is learnt

    c.replay = ConfigDict()  # pretraining text in post-training; against forgetting
    c.replay.share = 0.05  # of the tokens that count; 0 = none
    c.replay.path = (
        ""  # data directory or text; "" = the data of the origin, if it is a run (else no replay, and it is said)
    )

    c.dpo = p = ConfigDict()  # preferences
    p.loss = "sigmoid"  # sigmoid (arXiv:2305.18290), ipo, robust; orpo and simpo: no reference
    p.beta = 0.1  # how strongly the policy is held to the reference; ipo's tau, simpo's scale, orpo's lambda
    p.label_smoothing = 0.0  # the share of labels taken to be swapped; robust, and sigmoid as cDPO
    p.margin = 0.0  # simpo: the target margin, gamma
    p.nll_weight = 0.0  # of the cross-entropy of the chosen answers, which is added


def _reinforcement(c: ConfigDict) -> None:
    """Rollouts, rewards and the policy's loss: what ppo and grpo read beside the other sections."""
    c.rollout = r = (
        ConfigDict()
    )  # what the policy says in a step; at temperature 1, so that it is the policy that speaks
    r.prompts = 8  # prompts in a step
    r.answers = 8  # answers to each; grpo compares them with each other. train.batch_size rows share prompts x answers
    r.max_new_tokens = 256  # of an answer
    r.rows = 0  # answers that are drawn at once; 0 = all
    r.importance_cap = 0.0  # weights against a sampler that differs from the trainer, at most this; 0 = none

    c.policy = p = ConfigDict()  # the loss of ppo and grpo
    p.average = "token"  # token: over all tokens (DAPO, arXiv:2503.14476); answer: GRPO; length: Dr. GRPO
    p.ratio = "token"  # answer: one ratio for an answer (GSPO, arXiv:2507.18071)
    p.clip_low = 0.2  # the ratio is clipped to at least 1 - clip_low
    p.clip_high = 0.28  # and at most 1 + clip_high; above clip_low it keeps entropy (DAPO)
    p.scale_advantages = (
        False  # grpo: divide by the group's standard deviation (GRPO; Dr. GRPO, arXiv:2503.20783, doesn't)
    )
    p.mask_truncated = True  # answers that did not end do not count
    p.overlong_tokens = 0  # the last tokens before max_new_tokens cost up to 1 of the reward (DAPO); 0 = none
    p.epochs = 1  # times that a step goes over its answers
    p.minibatches = 1  # updates of each of them
    p.beta = 0.0  # weight of the KL divergence to the reference: in grpo's loss, in ppo's reward
    p.kl_target = 0.0  # ppo: adapts beta to this KL, in nats a token (arXiv:1909.08593); 0 = fixed
    p.kl_horizon = 10_000  # ppo: answers over which beta adapts
    p.reference = True  # False: nothing is held to compare with, and no KL is told; needs beta=0
    p.gamma = 1.0  # ppo: discount
    p.gae_lambda = 0.95  # ppo: of the advantages (arXiv:1506.02438)
    p.whiten = True  # ppo: advantages get mean 0 and variance 1
    p.value_clip = 0.2  # ppo: how far a value may move from the old one
    p.value_weight = 0.1  # ppo: of the value's loss
    p.value_from = "zero"  # ppo: what the value head begins as; reward: the head of reward.model

    c.reward = w = ConfigDict()  # what an answer is worth; several are added up
    w.tasks = ""  # prompts and their answers: reasoning_gym:chain_sum?max_terms=2,gsm8k; then data.path is not read
    w.function = ""  # MODULE:FUNCTION, (prompts, answers, **columns) -> numbers; in a process of its own
    w.model = ""  # a run of `reward`, or the folder of a Hugging Face model with one label
    w.format = ""  # a regular expression that an answer should match as a whole; a dot matches line breaks too
    w.format_weight = 0.1  # what that is worth
    w.run_code = False  # True: tasks that evaluate an answer may run it, in a process without network, disk and keys
    w.timeout_s = 60.0  # of tasks, and of the function, for all answers of a step; then for one that is tried alone


def _train(c: ConfigDict) -> None:
    """The optimizer steps."""
    c.train = t = ConfigDict()  # steps, batch, row length
    t.steps = 1000  # optimizer steps in all; raise it to continue a finished run
    t.batch_size = 64  # sequences per optimizer step, over all devices
    t.seq_len = 512  # tokens per sequence
    t.microbatch_size = 0  # sequences in memory at a time (accumulation); 0 = batch_size, -1 = auto, the most that fit
    t.eval_every_steps = 250  # held-out loss; 0 = at the end only
    t.max_nonfinite_steps = 20  # this many skipped steps in a row stop the run (exit code 3)

    c.loss = ConfigDict()  # the cross-entropy
    c.loss.z_loss = 0.0  # weight of log(Z)^2
    c.loss.tile_tokens = 2048  # tokens per tile of the cross-entropy, so that all logits never exist; 0 = plain

    c.optim = o = ConfigDict()  # optimizer and learning rate
    o.name = "adamw"  # muon: AdamW for what is no matrix of a layer
    o.mu_dtype = "float32"  # of the first moment (adamw, muon)
    o.ns_steps = 5  # iterations that orthogonalise a matrix (muon); 3: 40% fewer operations, for small models on a CPU
    o.full_precision = (r".*norm.*", r".*embed.*", r".*/bias")  # adamw8bit: parameters whose moments stay float32
    o.offload = False  # the optimizer's state lives in host memory and visits the device at each update
    o.lr = 1e-3  # peak learning rate; 0 = by rule, from parameters, tokens and batch (pretraining)
    o.matrix_lr_ratio = 1.0  # times lr: the rate of the layers' matrices; 0 = by rule (muon)
    o.rows_lr_ratio = 1.0  # times lr: the rate of the rows of adapter.rows where all parameters are fine-tuned
    o.schedule = "cosine"  # of the learning rate after its linear warm-up; wsd = warm-up, stable, decay
    o.warmup_steps = 100  # steps in which the rate rises from 0 to its peak
    o.decay_fraction = 0.2  # wsd: the last part of the steps, in which the rate falls
    o.final_lr_ratio = 0.1  # rate of the last step over the peak; with 0 that step changes nothing
    o.schedule_steps = 0  # the steps that the schedule is made for; 0 = train.steps
    o.decay_at_step = 0  # after this step the rate falls linearly to 0 at the end of the run; 0 = as the schedule says
    o.b1 = 0.9  # decay rate of the first moment
    o.b2 = 0.95  # decay rate of the second moment; 0 = by rule, from the tokens of a step (pretraining)
    o.eps = 1e-8  # added to the square root of the second moment
    o.weight_decay = 0.1  # decoupled from the gradient
    o.decay_follows_rate = False  # True: times the rate over its peak, so that what decays falls as the rate's square
    o.decay = (r".*/kernel", r".*/lora_[ab]")  # parameters that decay (full match of their path)
    o.no_decay = (
        r".*norm.*",
        r".*embed.*",
        r".*/bias",
        r".*/rows",
    )  # those that do not; each must be in exactly one list
    o.clip_norm = 1.0  # of the global gradient norm; 0 = off


def _outputs(c: ConfigDict) -> None:
    """What a run leaves behind, and how it is judged on the way."""
    c.checkpoint = ConfigDict()  # when to save and what to keep
    c.checkpoint.every_steps = 1000  # 0 = by time, and at the end
    c.checkpoint.every_minutes = -1.0  # also when this much work is unsaved; -1 = auto (Young/Daly); 0 = by steps alone
    c.checkpoint.verify = True  # read each one back from disk, and compare, before an older one is deleted
    c.checkpoint.keep_last = 2  # the latest checkpoints that stay
    c.checkpoint.keep_every = 0  # also keep each checkpoint whose step is a multiple of this, for good
    c.checkpoint.keep_best = 1  # also keep this many of the best by `best_metric`
    c.checkpoint.best_metric = "val/loss"  # by which the best are chosen: any name in metrics.jsonl
    c.checkpoint.best_is = "lowest"  # or highest, as for an accuracy
    c.checkpoint.reserve_mb = 64.0  # real blocks held back on the disk, so that a full one still takes logs
    c.checkpoint.max_unprotected_minutes = 120.0  # unsaved work beyond this ends the run while saving fails; 0 = never
    c.checkpoint.max_unprotected_usd = 0.0  # the same in dollars; 0 = never
    c.checkpoint.mirror = ""  # folder or URL (s3://, gs://, hf://): a copy of each verified checkpoint and the logs
    c.checkpoint.mirror_weights_only = False  # without the optimizer's state: for sampling and export, not to resume
    c.checkpoint.mirror_keep_last = 2  # the latest checkpoints that stay there, beside milestones
    c.checkpoint.mirror_timeout_s = 3600.0  # a copy that takes longer is abandoned and begun again

    c.eval = ConfigDict()  # held-out loss and benchmarks
    c.eval.batch_size = 0  # sequences in memory at a time, which changes no result; 0 = microbatch_size
    c.eval.at_start = False  # also before the first step
    c.eval.max_mb = 4.0  # the first megabytes of each source's held-out text; 0 = all
    c.eval.max_examples = 400  # the first held-out chats, pairs or prompts; 0 = all
    c.eval.older_batches = ()  # (batches, rows of each) that a run begun with eval.max_batches keeps; () = the limits above
    c.eval.tasks = ()  # benchmarks in training and of `jaxlm eval` by default: arc_easy, piqa, ...; () = none
    c.eval.tasks_every_steps = 0  # in training; 0 = at the end only
    c.eval.max_items = 200  # of each task in training, always the same; 0 = all
    c.eval.fewshot = -1  # worked examples before each question; -1 = as each task says
    c.eval.chat_template = False  # True: ask in the model's chat template, worked examples as turns
    c.eval.data_dir = ""  # folder of benchmark files; "" = from the hub (https://huggingface.co)
    c.eval.run_code = (
        False  # True: run what a model wrote: HumanEval in a process without network, others' scorers in this one
    )
    c.eval.run_code_with_network = False  # True: also where the network can't be cut off
    c.eval.code_seconds = 10.0  # for each program, on a core; four times as many by the clock
    c.eval.code_memory_mb = 1024.0  # for each program
    r = c.eval.redteam = ConfigDict()  # the task redteam: what a model writes after prompts that lead astray
    r.scorers = ()  # MODULE:FUNCTION, ...: (prompts, texts) -> a score from 0 to 1 of each text
    r.toxicity = True  # False: no toxicity scores, and no category toxic (for those: pip install "jaxlm[toxicity]")
    r.max_new_tokens = 64  # of each text
    r.temperature = 0.0  # 0 = the likeliest token
    r.seed = 0  # of texts with a temperature
    r.search_tokens = 1_000_000_000  # of the training data searched for what the model wrote; 0 = all

    c.sample = s = ConfigDict()  # texts that the run writes
    s.prompts = ()  # texts to continue; () = no samples
    s.every_steps = 0  # 0 = at `at_steps` and at the end only
    s.at_steps = ()  # after these steps too
    s.max_new_tokens = 96  # of each continuation, at most
    s.temperature = 0.8  # 0 = greedy
    s.also_greedy = False  # True: each prompt is continued greedily too
    s.chat_template = False  # True: each prompt is what a user says, in the model's chat template
    s.top_k = 50  # draw from this many likeliest tokens; 0 = off
    s.top_p = 0.95  # draw from the likeliest tokens that have this probability together; 1 = off


def _runs(c: ConfigDict) -> None:
    """How a run survives, what it may cost, and when it stops."""
    c.phases = ConfigDict()  # milestones; each ends with an evaluation, samples, a bill and a gate
    c.phases.plan = ConfigDict()  # NAME -> base.phase(steps, usd, ...)
    c.phases.accept = ""  # go on although this phase failed its gate or spent its budget
    c.phases.shrink = ""  # cpu = the whole plan small: 2 layers of d 128, 8 rows of 128, steps and dollars over 500

    c.stop = ConfigDict()  # when to stop; by what the run took, by the forecast of the loss
    c.stop.usd = 0.0  # what the whole run may cost: all starts, and the pauses that were paid for; 0 = no limit
    c.stop.hours = 0.0  # the same in hours; raise them to go on
    c.stop.usd_per_centinat = 0.0  # stop when the rest of the plan costs more than this for 0.01 nats; 0 = never

    c.stability = s = ConfigDict()  # non-finite steps, loss spikes; what to do about them
    s.roll_back = True  # to the last good checkpoint, past the batches that spoiled it; False = stop (exit code 3)
    s.spike_z = 8.0  # robust z-score of a step's loss from which it is a spike; 0 = off
    s.spike_steps = 20  # this many spikes in a row call for a rollback; 0 = only log them
    s.window = 256  # steps before a spike that its z-score is computed from
    s.skip = ()  # batches to pass over, by hand: "A:B" from batch A to batch B of the order
    s.overfit_evals = 3  # say so when validation rose this many times in a row while training fell; 0 = off

    c.runs = r = ConfigDict()  # supervisor, hangs, the end
    r.supervise = "auto"  # restart training after a crash or a hang; auto: unless Slurm, SkyPilot or Kubernetes does
    r.backoff_s = 5.0  # before the first restart; doubles with each without progress, up to 5 minutes
    r.hang_s = 0.0  # no sign of life for this long is a hang; 0 = learned from the run's own times
    r.notices = ()  # preemption notices to ask for: gce, aws
    r.on_exit = ConfigDict()  # a shell command by cause, run last, when all is mirrored: "runpodctl stop pod $ID"
    r.on_exit.done = ""  # all steps are done
    r.on_exit.gate = ""  # a gate, a budget or the forecast stopped it, or non-finite steps (exit code 3)
    r.on_exit.failed = ""  # crash that no restart mended, or bad input (exit codes 1 and 2)
    r.on_exit.stopped = ""  # interrupted with its state saved (exit code 4)
    r.on_exit_unmirrored = False  # True: run it although no mirror holds the last checkpoint

    c.notify = ConfigDict()  # messages to you
    c.notify.urls = ()  # https:// = webhook (JSON); other schemes need pip install "jaxlm[notify]" (apprise)
    c.notify.events = ("gate", "stall", "crash", "end", "budget")  # what is told
    c.notify.heartbeat_url = ""  # asked every heartbeat_minutes while steps go on; its silence is the alarm
    c.notify.heartbeat_minutes = 5.0  # between two of them


def phase(steps: int = 0, tokens: int = 0, usd: float = 0.0, **gate) -> dict:
    """A phase of `phases.plan`: `phase(steps=200, usd=5.0, max_val_loss=7.0)`."""
    p = ConfigDict()
    p.steps = steps  # the phase ends after this step of the run; 0 = by tokens
    p.tokens = tokens  # or after this many tokens of the run
    p.usd = usd  # budget of this phase alone; 0 = none
    p.max_val_loss = 0.0  # gate: held-out loss at its end; 0 = none
    p.min_tokens_per_second = 0.0  # gate: speed at its end; 0 = none
    p.max_nonfinite_steps = -1  # gate: skipped steps in it; -1 = none
    unknown = set(gate) - set(p)
    if unknown:
        raise ValueError(f"phase has no key {sorted(unknown)}; there are {sorted(p)}")
    return p.to_dict() | gate


def _machine(c: ConfigDict) -> None:
    """Devices, logs and processes."""
    c.mesh = ConfigDict()  # devices on each axis; -1 = all that remain
    c.mesh.data = -1  # copies of the model, each on its part of the batch
    c.mesh.fsdp = 1  # the batch and the parameters split over these
    c.mesh.tensor = 1  # heads, feed-forward and vocabulary split over these
    c.mesh.context = 1  # the tokens of each row split over these (long rows)

    c.log = ConfigDict()  # what is logged, and how often
    c.log.every_steps = 10  # a line of metrics.jsonl and of the terminal
    c.log.parameters = False  # True: show the table of all parameters and their shapes at the start
    c.log.tensorboard = True  # write WORKDIR/tensorboard
    c.log.wandb = ""  # Weights & Biases (pip install "jaxlm[wandb]"); "" = off

    c.hardware = ConfigDict()  # price, peak, compile cache
    c.hardware.usd_per_hour = 0.0  # what the machine costs, for the dollars in the progress line
    c.hardware.peak_tflops = 0.0  # of one device, for MFU; 0 = by the device's name
    c.hardware.compile_cache = "~/.cache/jaxlm/xla"  # persistent compile cache; "" = off
    c.hardware.xla_flags = ()  # XLA flags added to those that jaxlm sets (docs/performance.md); the later one counts

    c.profile = ConfigDict()  # a trace of some steps
    c.profile.steps = ""  # trace steps A to B of A:B for TensorBoard and Perfetto, and print what took the time

    c.distributed = ConfigDict()  # several processes; found by themselves under Slurm and Open MPI
    c.distributed.auto = False  # True: JAX looks for a cluster that it knows (GKE, GCE TPU pods, Kubernetes)
    c.distributed.coordinator = ""  # host:port of process 0
    c.distributed.num_processes = 0  # with a coordinator: how many processes there are
    c.distributed.process_id = -1  # with a coordinator: which of them this is, from 0
    c.distributed.start_timeout_s = 300.0  # a process that has not come by then ends the start
    c.distributed.heartbeat_s = 100.0  # a process that is silent for this long ends the run

    c.plan = p = ConfigDict()  # what `jaxlm plan` assumes
    p.mesh = ""  # plan for a mesh that is not there, such as fsdp:64 or data:4,fsdp:8; "" = one device of each kind
    p.hosts = 0  # over how many hosts that mesh goes; 0 = eight devices to a host
    p.prices = ""  # your own copy of configs/prices.toml; "" = the shipped one
    p.accelerator = ""  # only this one of the prices file; "" = all
    p.compile = True  # compile the real step for the mesh, from shapes alone; False = arithmetic only
    p.measure = "auto"  # this machine's speed: auto = once, in a minute or less, then kept; never; again = anew
    p.preemptions_per_day = 2.0  # of a spot machine
    p.restart_minutes = 10.0  # from a preemption to the next step: a new machine, data, compile

    c.tune = t = ConfigDict()  # what `jaxlm tune` tries; it varies one setting after the other from the best so far
    t.exhaustive = False  # True: every combination
    t.microbatch_sizes = ()  # () = halves of train.batch_size, down to the mesh's own
    t.remat = ("none", "names", "dots", "full")  # of model.remat
    t.attention = ()  # of model.attention; () = every backend that this device runs
    t.scan_layers = (False, True)  # of model.scan_layers
    t.tile_tokens = (0, 2048)  # of loss.tile_tokens
    t.steps = 10  # timed for each at most
    t.step_seconds = 20.0  # of timing for each at most, but two steps at least
    t.max_seconds = 1800.0  # begin no further candidate after this
    t.memory_gb = 0.0  # of a device; 0 = what it says it has

    c.engine = "local"  # what runs the tasks of `jaxlm prepare`


def _prepare(c: ConfigDict) -> None:
    """`jaxlm prepare`: the sources with their stages in order, and what each stage does by default."""
    c.prepare = p = ConfigDict()  # raw documents to clean ones
    p.sources = ConfigDict()  # NAME -> base.source(path, stages, ...)
    p.workers = 0  # processes at a time (local), or the most tasks at a time (ray, slurm); 0 = one per core
    p.engine_options = ()  # NAME=VALUE: of sbatch (partition=cpu, time=12:00:00) or of ray.init (address=auto)
    p.task_mb = 64.0  # of input per task; the outcome depends on it, not on the number of workers
    p.memory_gb = 1.0  # for what looks at all documents together (it goes to disk beyond this)
    p.examples = 20  # removed documents shown in the report, per source, stage and reason
    p.excerpt_chars = 500  # of each removed document in removed/STAGE.jsonl.gz
    p.report_mb = 8.0  # of each source's documents that the audit and the mismatch report look at; 0 = neither
    p.target = ""  # a folder of "what I want it to write like", for the mismatch report
    p.stages = s = ConfigDict()  # each stage's settings; a source may set its own: "gopher_quality min_words=30"
    stages.cleaning(s)
    stages.published_rules(s)
    stages.judges(s)
    stages.guards(s)
    stages.deduplication(s)


def source(path: str = "", stages: tuple[str, ...] = (), **keys) -> dict:
    """A source of `prepare.sources`: `source("docs/*.html", stages=("html", "unicode"), priority=1)`."""
    s = ConfigDict()
    s.path = path  # required: folder, file, glob, URL that fsspec knows, tfds:NAME, hub:REPOSITORY, embedded:NAME
    s.format = "auto"  # auto (by name) | text | markdown | markup | html | warc | code | mediawiki | jsonl | parquet
    s.text_key = "text"  # the field that holds the text, in jsonl, parquet and datasets
    s.stages = stages  # in order, each with its settings: "gopher_quality min_words=30"
    s.priority = 0  # of two duplicates, the one from the source with the higher priority stays
    s.weight = 1.0  # in the mixture to train on
    s.max_bytes = 0  # of text to read; 0 = all
    s.exclude = ()  # files and folders below the path that are left out, by name: "_static", "*.css"
    s.licences = ()  # code: keep files under these SPDX licences only; () = all
    unknown = set(keys) - set(s)
    if unknown:
        raise ValueError(f"source has no key {sorted(unknown)}; there are {sorted(s)}")
    return s.to_dict() | keys
