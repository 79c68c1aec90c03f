"""TITLE nodes/options"""
