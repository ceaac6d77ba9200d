"""Direct tensor transport between processes and devices."""
