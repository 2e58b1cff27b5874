"""Running host programs: `op` is the callable, `walk` takes the steps of a plan, `library` is for torch.compile."""
