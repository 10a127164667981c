"""What is said and shown about a run: findings, reports and pages."""
