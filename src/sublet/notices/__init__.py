"""Sources of Notices: clouds, schedulers, limits. Each is one file and one entry point of the group `sublet.notices`."""
