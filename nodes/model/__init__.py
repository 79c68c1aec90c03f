"""TITLE nodes/model"""
