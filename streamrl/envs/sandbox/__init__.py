"""Runs unreviewed code and text of the policy where it can do no harm."""
