"""What every room stands on: types, trees of inputs, checks, progress, memory."""
