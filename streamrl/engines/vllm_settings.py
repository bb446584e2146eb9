"""The run's configuration in vLLM's words: environment, engine arguments, sampling. Knows no engine that runs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from streamrl.config.rollout import ModelConfig, RolloutConfig
from streamrl.engines.vllm_transfer import BACKEND
from streamrl.protocol.generate import SamplingParams

if TYPE_CHECKING:
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs


METRICS: dict[str, Any] = {  # its own are on the rollout actor's page, which shows no paths: the name of the model is a label of all of them
    "disable_log_stats": False,
    "served_model_name": "policy",
}
CPU_BLOCK_TOKENS = 32  # the smallest that attention on the CPU takes; with vLLM's 128 the sessions of a group share nothing of a shorter prompt
CPU_BATCH_TOKENS = 4096  # of one step: enough to prefill some dozens of short prompts together


def set_environment(rollout: RolloutConfig, threads: int, on_cpu: bool) -> None:
    """Defaults that vLLM reads from the environment; what the user has set stays. Spawned, not forked: this process has threads."""
    defaults = {"VLLM_NO_USAGE_STATS": "1", "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn"}
    if on_cpu:
        defaults |= {
            "VLLM_CPU_KVCACHE_SPACE": str(rollout.vllm.cpu_kvcache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(threads),
            "TORCH_COMPILE_DISABLE": "1",  # eager anyway but for two helpers of the sampler, which would be compiled for longer than a model takes to load
        }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def engine_args(model: ModelConfig, rollout: RolloutConfig, max_model_len: int, seed: int, on_cpu: bool) -> AsyncEngineArgs:
    """``rollout.vllm.engine_kwargs`` has the last word."""
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    options = rollout.vllm
    arguments: dict[str, Any] = {
        "model": model.path,
        "trust_remote_code": model.trust_remote_code,
        "skip_tokenizer_init": True,
        "dtype": rollout.dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "tensor_parallel_size": options.tensor_parallel_size,
        "enforce_eager": options.enforce_eager or on_cpu,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "seed": seed,
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
    }
    if on_cpu:
        # a prompt cut into chunks makes vLLM take back a seeded generator's step, which CPU generators can't: the engine would die
        arguments |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(max_model_len, CPU_BATCH_TOKENS)}
        arguments["block_size"] = CPU_BLOCK_TOKENS
    else:
        arguments["gpu_memory_utilization"] = options.gpu_memory_utilization
    return AsyncEngineArgs(**arguments | METRICS | options.engine_kwargs)


def vllm_sampling(sampling: SamplingParams, eos_ids: frozenset[int]) -> vllm.SamplingParams:
    """Ours in vLLM's words. One output at the end: a wake-up per token would cost more than a small model's forward."""
    from vllm import SamplingParams as VllmSampling
    from vllm.sampling_params import RequestOutputKind

    return VllmSampling(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        repetition_penalty=sampling.repetition_penalty,
        seed=sampling.seed,
        stop_token_ids=sorted({*eos_ids, *sampling.stop_token_ids}),
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
