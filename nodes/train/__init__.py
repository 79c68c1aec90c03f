"""TITLE nodes/train"""
