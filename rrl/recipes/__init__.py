"""One module per paper, with its prompts, protocol, rewards, advantages and hyperparameters. Read `rrl.recipes.base` first."""
