"""The systems that come with Lockstep, each whole: science, task, config, commands and reports."""
