// Jbofd serves a box of SSDs as NVMe over Fabrics.
//
//	jbofd --config FILE         run
//	jbofd --demo                run the embedded default on loopback
//	jbofd validate [FILE...]    check configurations
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"

	"github.com/spf13/cobra"

	"jbofd/internal/config"
	"jbofd/internal/daemon"
)

// version is set by the linker.
var version = "dev"

func main() {
	if err := command().Execute(); err != nil {
		fmt.Fprintln(os.Stderr, "jbofd:", err)
		os.Exit(1)
	}
}

func command() *cobra.Command {
	var path string
	var demo, printConfig bool
	c := &cobra.Command{
		Use:           "jbofd {--config FILE | --demo}",
		Short:         "Serve a box of SSDs as NVMe over Fabrics",
		Version:       version,
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			load := func() (*config.Config, error) { return config.Load(path) }
			switch {
			case demo == (path != ""):
				return fmt.Errorf("give one of --config FILE and --demo")
			case demo:
				load = func() (*config.Config, error) {
					return config.ParseEnv(config.DefaultName, config.DefaultYAML(), os.Environ())
				}
			}
			cfg, err := load()
			if err != nil {
				return err
			}
			if printConfig {
				_, err := cmd.OutOrStdout().Write(cfg.Effective())
				return err
			}
			return run(cfg, load, cmd.ErrOrStderr())
		},
	}
	c.PersistentFlags().StringVarP(&path, "config", "c", "", "configuration `FILE` (YAML)")
	c.Flags().BoolVar(&demo, "demo", false, "use the embedded default: three file-backed drives in ./data, loopback only")
	c.Flags().BoolVar(&printConfig, "print-effective-config", false, "print the configuration with all defaults and exit")
	c.AddCommand(&cobra.Command{
		Use:   "validate [FILE...]",
		Short: "Check configurations (of --config, or the files named) without starting",
		RunE: func(cmd *cobra.Command, files []string) error {
			if path != "" {
				files = append(files, path)
			}
			if len(files) == 0 {
				return errors.New("nothing to validate: name a file")
			}
			bad := 0
			for _, f := range files {
				if _, err := config.Load(f); err != nil {
					fmt.Fprintln(cmd.ErrOrStderr(), err)
					bad++
					continue
				}
				fmt.Fprintf(cmd.OutOrStdout(), "%s: valid\n", f)
			}
			if bad > 0 {
				return fmt.Errorf("%d of %d configurations are not valid", bad, len(files))
			}
			return nil
		},
	})
	return c
}

// run runs the node until SIGTERM or SIGINT.
func run(cfg *config.Config, load func() (*config.Config, error), stderr io.Writer) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP)
	defer signal.Stop(hup)
	return daemon.Run(ctx, daemon.Options{
		Config: cfg, Load: load, Reload: hup, Stderr: stderr, Version: version, Commit: commit(),
		Ready: func(a daemon.Addresses) { printAddresses(stderr, cfg, a) },
	})
}

// commit is the revision that the binary was built from.
func commit() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				return s.Value
			}
		}
	}
	return "unknown"
}
