"""Process sets: start rank processes, send them commands, collect their samples and end them."""
