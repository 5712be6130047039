"""Where tensors of a prepared model lie: weights, gradients, buffers, and memory that devices or processes share."""
