"""Tests of backups without a cluster; tests/integration/test_backups has one."""
