"""Host programs below the language: `plan` is what is run, `lower` makes it, `sizing` chooses the chunks, `text` shows
it."""
