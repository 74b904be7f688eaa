"""The workflow `generate`: one prompt, one answer, and a reward if the task names one."""

from __future__ import annotations

from rollmq.errors import WorkflowError
from rollmq.rollout import EpisodeResult, TaskSpec
from workers.workflows.base import EpisodeContext


class SingleTurnWorkflow:
    """`data["reward"]` names the reward function; without it the trajectory has none."""

    async def run(self, context: EpisodeContext, spec: TaskSpec) -> EpisodeResult:
        """Generates once. Raises WorkflowError if `data["reward"]` is not a name."""
        reward_name = spec.data.get("reward")
        if reward_name is not None and not isinstance(reward_name, str):
            raise WorkflowError(f"data['reward'] is {reward_name!r:.60}; it must be the name of a reward function")
        response = (await context.generate(spec.request)).response
        reward = None
        if reward_name is not None:
            reward = await context.reward(
                reward_name,
                prompt_ids=response.input_ids,
                completion_ids=response.output_ids,
                data=spec.data,
            )
        return EpisodeResult(
            input_ids=response.input_ids,
            output_ids=response.output_ids,
            output_logprobs=response.output_logprobs,
            version_spans=response.version_spans,
            stop_reason=response.stop_reason,
            reward=reward,
            loss_mask=[1] * len(response.output_ids),
            metrics={"latency_s": response.latency_s, "interruptions": float(response.interruptions)},
            metadata=spec.request.metadata,
        )
