"""TITLE data/buckets"""
