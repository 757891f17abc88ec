"""The next engine step: which prompts are in progress, which requests are in the batch, and how prompts are cut."""

from pinyon.batching.chunked_hash_tree import BestRequest, ChunkedHashTree
from pinyon.batching.decoded_prefixes import LEVEL_BLOCKS, DecodedPrefixes
from pinyon.batching.engine_step import DecodeSlot, LayerHook, PrefillChunk
from pinyon.batching.fcfs import Fcfs
from pinyon.batching.interface import BatchingPolicy
from pinyon.batching.policies import BATCHING_DEFAULT, BATCHING_POLICIES
from pinyon.batching.policy import BatchRequest, BlockNeed, HeldBlocks, StepSeen
from pinyon.batching.prompt_queue import Prompt, PromptQueue
from pinyon.batching.rounds import Formed
from pinyon.batching.step import PromptWork, StepLimits, StepPlan, StepScheduler, plan_chunks
from pinyon.batching.token_counts import TokenCounts

__all__ = [
    "BATCHING_DEFAULT",
    "BATCHING_POLICIES",
    "LEVEL_BLOCKS",
    "BatchRequest",
    "BatchingPolicy",
    "BestRequest",
    "BlockNeed",
    "ChunkedHashTree",
    "DecodeSlot",
    "DecodedPrefixes",
    "Fcfs",
    "Formed",
    "HeldBlocks",
    "LayerHook",
    "PrefillChunk",
    "Prompt",
    "PromptQueue",
    "PromptWork",
    "StepLimits",
    "StepPlan",
    "StepScheduler",
    "StepSeen",
    "TokenCounts",
    "plan_chunks",
]
