"""The control plane's wire: messages, frames, connections, and how a peer introduces itself."""
