"""One file a peer: each trains the same module and batches through one system's own public
interface."""
