"""Process sets: start their ranks, send them commands, collect samples, end them."""
