package main

import (
	"github.com/spf13/cobra"
)

func discoverCommand() *cobra.Command {
	return &cobra.Command{Use: "discover", Hidden: true, RunE: func(*cobra.Command, []string) error { return errFailed }}
}
