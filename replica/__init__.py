"""One data-parallel replica: HTTP server, tokenizer, scheduler, step loop and one worker process per rank."""
