from codistill.ops.dispatch import Apart, weights_apart

WeightGradientStreams, defer_weight_gradients = Apart, weights_apart
