"""A recorded run: replay, audit, forks, exports, dead letters."""
