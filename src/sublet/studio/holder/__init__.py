"""The session host: the process that holds a host's studio sessions, so that they outlive the service."""
