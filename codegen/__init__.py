"""From the tile IR to source text: normal form, schedules, phases, and one emitter a backend."""
