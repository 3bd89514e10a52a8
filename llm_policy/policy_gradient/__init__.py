"""PPO and TRPO with a network or a language model as the actor, on stable-baselines3 and sb3-contrib."""
