"""The keys of other trainers and ours: TrainingArguments, TRL, axolotl, LLaMA-Factory, litgpt, nanochat, torchtitan.

`docs/coming_from.md` prints this table, and an unknown key that is in it leads to ours.
"""

import functools
from collections.abc import Sequence

# Our key, perhaps with what is counted otherwise: their names. "-" for what has no key, with the reason.
_TABLE = """
workdir: output_dir out_dir dump_folder logging_dir checkpoint.folder model_tag run_name wandb_name
origin: model_name_or_path base_model checkpoint_dir initial_checkpoint_dir initial_load_path sft_model_path
  lora_model_dir adapter_name_or_path
program: stage rl training_type
model.family: model_type model_name model.name architectures
model.n_layers: num_hidden_layers n_layer depth num_layers
model.d_model: hidden_size n_embd model_dim dim
model.n_heads: num_attention_heads n_head
model.n_kv_heads: num_key_value_heads n_query_groups kv_head n_kv_head
model.d_ff: intermediate_size ffn_hidden_size
model.max_seq_len: max_position_embeddings
model.max_seq_len (the longest text it can read; rows to train on are train.seq_len): block_size
model.tie_embeddings: tie_word_embeddings
model.rope.theta: rope_theta rope_base
model.rope.scaling: rope_scaling
model.dtype: bf16 fp16 pure_bf16 torch_dtype precision mixed_precision_param tf32 load_dtype
model.fp8: float8 enable_fsdp_float8_all_gather
model.attention: attn_implementation flash_attention flash_attn xformers_attention sdp_attention use_flash_attention
model.remat: gradient_checkpointing activation_checkpoint.mode activation_checkpointing selective_ac_option
  gradient_checkpointing_kwargs
data.dir: dataset_prepared_path
data.path: dataset_name dataset datasets dataset_path train_file data_path
data.text_key: dataset_text_field text_field text_column field
data.tokenizer: tokenizer_path tokenizer_name tokenizer_dir tokenizer_name_or_path hf_assets_path
data.chat_tokens: special_tokens
data.val_fraction: val_set_size val_size validation_split_percentage test_size val_split_fraction
  dataset_test_split validation_file eval_dataset
examples.template: template chat_template_path chat_template
examples.format: dataset_format
examples.last_only: mask_history
adapter.kind: use_peft finetuning_type adapter load_adapter
adapter.rank: lora_r lora_rank
adapter.alpha: lora_alpha
adapter.dropout: lora_dropout
adapter.targets: lora_target lora_target_modules lora_target_linear lora_query lora_key lora_value lora_projection
  lora_mlp lora_head
adapter.rows: lora_modules_to_save modules_to_save additional_target
adapter.rslora: use_rslora
adapter.quantize: load_in_4bit load_in_8bit quantization_bit quantize bnb_4bit_quant_type
train.steps: max_steps num_iterations total_steps training.steps max_iters
train.steps (steps; jaxlm plan says how many tokens a parameter that is): target_param_data_ratio
train.steps (steps of batch_size x seq_len tokens): max_tokens total_episodes
train.steps (steps, not passes): num_train_epochs num_epochs train.epochs epochs
train.batch_size: global_batch_size total_batch_size train_batch_size examples_per_step
train.batch_size (rows of all devices together): per_device_train_batch_size device_batch_size local_batch_size
train.microbatch_size: micro_batch_size
train.microbatch_size (rows at once, not how many times): gradient_accumulation_steps
train.seq_len: max_seq_length sequence_len cutoff_len max_length block_length model_max_length
train.eval_every_steps: eval_steps eval_strategy evaluation_strategy eval_every eval.interval validation.freq
  eval_interval
train.eval_every_steps (steps between two): evals_per_epoch
train.max_nonfinite_steps: logging_nan_inf_filter
loss.z_loss: z_loss_weight
optim.name: optim optimizer optim.type
optim.lr: learning_rate max_lr base_lr peak_lr matrix_lr
optim.rates: embedding_lr unembedding_lr embedding_learning_rate
optim.schedule: lr_scheduler_type lr_scheduler decay_type lr_decay_style
optim.warmup_steps: lr_warmup_steps warmup_iters
optim.warmup_steps (steps, not a share): warmup_ratio lr_warmup_fraction
optim.decay_fraction: warmdown_ratio decay_ratio cooldown_fraction
optim.final_lr_ratio: min_lr_factor final_lr_frac cosine_min_lr_ratio lr_scheduler_kwargs min_lr_ratio
optim.final_lr_ratio (a share of optim.lr): min_lr
optim.b1: adam_beta1 beta1
optim.b2: adam_beta2 beta2
optim.eps: adam_epsilon
optim.weight_decay: wd
optim.clip_norm: max_grad_norm max_norm grad_clip gradient_clipping clip_grad
checkpoint.every_steps: save_steps save_strategy save_interval checkpoint.interval save_every
checkpoint.every_steps (steps between two): saves_per_epoch
checkpoint.keep_last: save_total_limit keep_latest_k
checkpoint.keep_best: load_best_model_at_end
checkpoint.best_metric: metric_for_best_model
checkpoint.best_is: greater_is_better
checkpoint.mirror: hub_model_id push_to_hub save_to_remote
stop.usd_per_centinat (dollars for a hundredth of a nat, not evaluations without gain): early_stopping_patience
  early_stopping_threshold
eval.batch_size: per_device_eval_batch_size eval_batch_size
eval.max_mb: eval_tokens eval_iters eval.max_iters validation.steps
eval.at_start: initial_validation
eval.tasks_every_steps: core_metric_every
eval.max_items: core_metric_max_per_task eval_limit
sample.every_steps: sample_every
sample.max_new_tokens: eval.max_new_tokens
log.every_steps: logging_steps log_interval log_freq logging_strategy
log.tensorboard: enable_tensorboard
log.wandb: report_to wandb_project wandb_entity enable_wandb logger_name use_wandb wandb_log_model
profile.steps: enable_profiling profile_freq
- (XLA always compiles): torch_compile compile.enable torch_compile_backend
mesh.data: data_parallel_replicate_degree
mesh.fsdp: data_parallel_shard_degree fsdp fsdp_config deepspeed fsdp_reshard_after_forward zero_stage
mesh.tensor: tensor_parallel_degree
mesh.context: context_parallel_degree sequence_parallel_size
distributed.num_processes: num_nodes local_rank nnodes
distributed.start_timeout_s: ddp_timeout init_timeout_seconds
dpo.beta: pref_beta dpo_beta
dpo.loss: loss_type pref_loss
dpo.label_smoothing: label_smoothing_factor
dpo.nll_weight: rpo_alpha pref_ftx
rollout.prompts: num_prompts
rollout.answers: num_generations num_samples num_return_sequences
rollout.max_new_tokens: max_completion_length response_length
policy.beta: kl_coef init_kl_coef
policy.clip_low: cliprange epsilon clip_range
policy.clip_high: epsilon_high
policy.epochs: num_ppo_epochs ppo_epochs
policy.minibatches: num_mini_batches
policy.gae_lambda: lam
policy.value_weight: vf_coef
policy.value_clip: cliprange_value
policy.whiten: whiten_rewards
policy.scale_advantages: scale_rewards
policy.reference: sync_ref_model ref_model
policy.mask_truncated: mask_truncated_completions missing_eos_penalty
reward.model: reward_model_path reward_model
reward.function: reward_funcs reward_weights
- (a run goes on by the same command): resume_from_checkpoint resume overwrite_output_dir resume_from_step
  auto_resume_from_checkpoints
- (the command is the verb: jaxlm train, eval): do_train do_eval do_predict
- (documents and examples are always packed): packing sample_packing neat_packing pad_to_sequence_len
  eval_sample_packing group_by_length
- (Grain reads ahead by itself): dataloader_num_workers num_workers preprocessing_num_workers dataset_num_proc
  dataloader_pin_memory
- (all devices that JAX sees; mesh.* says how they share the work): devices
- (all examples of a file are read: give a shorter one): max_samples
- (the tokenizer and the template bring their own): eos_token pad_token bos_token
- (all parameters are trained, or those that adapter.kind adds): freeze_trainable_layers unfrozen_parameters
- (only the assistant's tokens count in the loss): train_on_inputs assistant_only_loss completion_only_loss
- (rows are read from files; see docs/data.md for hub:REPO): streaming trust_remote_code remove_unused_columns
  access_token dataset_config
- (no pipeline parallelism: mesh.fsdp and mesh.tensor split the model): pipeline_parallel_degree
- (answers are drawn by the trainer itself): use_vllm vllm_mode vllm_gpu_memory_utilization
- (noise on embeddings is not built): neftune_noise_alpha
- (windowed attention is not built): window_pattern sliding_window
- (XLA fuses kernels by itself): use_unsloth enable_liger_kernel use_liger_kernel liger_kernel
- (the report of each run has the curves: jaxlm report RUN): plot_loss
- (jaxlm export RUN --to=hf writes the model): export_dir export_dtype save_safetensors last_save_model_only
"""


@functools.cache
def table() -> dict[str, tuple[str, str]]:
    """Returns their name -> (our key, ""), or ("", why there is none)."""
    names = {}
    for line in _TABLE.replace("\n  ", " ").strip().splitlines():
        ours, _, theirs = line.rpartition(": ")
        names |= dict.fromkeys(theirs.split(), ("", ours[3:-1]) if ours.startswith("- (") else (ours, ""))
    return names


def hint(key: str, keys: Sequence[str]) -> str:
    """Returns what an unknown key of another trainer is called here, or why there is no such key; "" if it is not known.

    keys: ours. The last part of one of them in another section is a key of ours, except `epochs`, which PPO alone has.
    """
    key = key.replace("-", "_")
    last = key.rpartition(".")[2]
    own = last != "epochs" and any(each.rpartition(".")[2] == last for each in keys)
    parts = key.split(".")
    dotted = (".".join(parts[at:]) for at in range(len(parts) - 1))  # train.model.name: model.name is torchtitan's
    known = next(filter(None, map(table().get, [key, *dotted])), None)
    ours, why = known or (not own and table().get(last)) or ("", "")
    return f"did you mean config.{ours}?" if ours else why and f"there is no such key: {why}"
