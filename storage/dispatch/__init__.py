"""The dispatcher and admission; publication, status and recovery of leases."""
