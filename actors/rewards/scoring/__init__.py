"""Calls of rewards, built in and your own: times, choice by prompt, checks, groups."""
