"""Coefficients of the step-time predictor: fitted to measured steps, and cached between starts."""
