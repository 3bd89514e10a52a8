"""CliffWalking-v1 and Taxi-v3 as `TableEnvironment`s, and the list of all of them."""

from llm_policy.environments.frozen_lake import FrozenLake

ENVIRONMENTS: dict[str, type] = {FrozenLake.env_id: FrozenLake}
