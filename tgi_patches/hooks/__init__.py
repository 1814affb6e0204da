"""What is laid over TGI's Python server: KV export and import, and nothing else.

    install -> guard (is this the TGI we know?) -> wrap TextGenerationService
    service made -> refusal (can this model be hooked?) -> wrap its batch, model and chooser
    Warmup over -> armed: arena open, fingerprint known, records flow

Every hook calls TGI's own function and looks after itself: whatever fails in here is counted, and the
request goes on as in a stock server.
"""
