"""TITLE nodes/common"""
