"""Tests of the language of conditions."""
