// Jbofd serves a box of SSDs as NVMe over Fabrics.
//
//	jbofd --config FILE         run
//	jbofd --demo                run the embedded default on loopback
//	jbofd validate [FILE...]    check configurations
//	jbofd etcd --cluster NAME   run a server of etcd for a cluster
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"jbofd/internal/admin"
	"jbofd/internal/config"
	"jbofd/internal/daemon"
)

// version and revision, the commit, are set by the linker.
var version, revision = "dev", ""

// The kernel gives a signal for a process to its main thread. If that hangs in a system call of a drive, SIGTERM waits
// for it, although others could take it. So the main thread does nothing but wait.
func init() { runtime.LockOSThread() }

func main() {
	status := make(chan int)
	go func() { status <- execute(os.Args[1:], os.Stdout, os.Stderr) }()
	os.Exit(<-status)
}

// loggedError is an error that the log of a daemon has.
type loggedError struct{ error }

// usageError is a command line that cannot be.
type usageError struct{ error }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// execute runs the command line and returns the exit status: 0 done, 1 failed, 2 a bad command line.
func execute(args []string, stdout, stderr io.Writer) int {
	c := command()
	c.SetArgs(args)
	c.SetOut(stdout)
	c.SetErr(stderr)
	err := c.Execute()
	if err == nil {
		return 0
	}
	if _, logged := errors.AsType[loggedError](err); !logged {
		fmt.Fprintln(stderr, "jbofd:", err)
	}
	if _, usage := errors.AsType[usageError](err); usage {
		return 2
	}
	return 1
}

func command() *cobra.Command {
	var path string
	var demo, printConfig bool
	c := &cobra.Command{
		Use:     "jbofd {--config FILE | --demo}",
		Short:   "Serve a box of SSDs as NVMe over Fabrics",
		Version: version,
		Args: func(_ *cobra.Command, args []string) error {
			if path == "onfig" || strings.HasPrefix(path, "onfig=") { // -config is read as -c onfig
				return usagef("-c%s has one dash; a configuration is given as --config FILE", path)
			}
			if len(args) > 0 {
				return usagef("unknown command %q; a configuration is given as --config FILE; see jbofd --help",
					args[0])
			}
			return nil
		},
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			// Before anything that may take time: a SIGHUP without a handler ends the process.
			hup := make(chan os.Signal, 1)
			signal.Notify(hup, syscall.SIGHUP)
			defer signal.Stop(hup)
			name := path
			load := func() (*config.Config, error) { return config.Load(path, daemon.Machine()) }
			switch {
			case demo == (path != ""):
				return usagef("give one of --config FILE and --demo")
			case path == "-":
				return usagef("--config is -, must be a file, because the daemon reads it again at a reload")
			case demo:
				name = config.DefaultName
				load = func() (*config.Config, error) {
					return config.ParseFor(daemon.Machine(), config.DefaultName, config.DefaultYAML(), os.Environ())
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
			if demo {
				// The drives of the embedded default are files in this directory.
				if err := os.Mkdir(cfg.Node.DataDir, 0o750); err != nil && !errors.Is(err, os.ErrExist) {
					return fmt.Errorf("--demo: %w", err)
				}
			}
			return run(cfg, name, load, hup, cmd.ErrOrStderr())
		},
	}
	c.PersistentFlags().StringVarP(&path, "config", "c", "", "configuration `FILE` (YAML)")
	c.Flags().BoolVar(&demo, "demo", false, "use the embedded default: three file-backed drives in ./data, "+
		"loopback only")
	c.Flags().BoolVar(&printConfig, "print-effective-config", false, "print the configuration with all defaults "+
		"and exit")
	c.AddCommand(validateCommand(&path), etcdCommand())
	c.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return usagef("%w; see %s --help", err, c.CommandPath())
	})
	return c
}

// validateCommand checks configurations; path is the value of --config.
func validateCommand(path *string) *cobra.Command {
	return &cobra.Command{
		Use:   "validate [FILE...]",
		Short: "Check configurations without starting: the file of --config, or those named; - is standard input",
		RunE: func(cmd *cobra.Command, files []string) error {
			if *path != "" {
				files = append(files, *path)
			}
			if len(files) == 0 {
				return usagef("nothing to validate: name a file, or - for standard input")
			}
			bad := 0
			for _, f := range files {
				cfg, err := config.Load(f, daemon.Machine())
				if err != nil {
					fmt.Fprintln(cmd.ErrOrStderr(), err)
					bad++
					continue
				}
				for _, r := range cfg.Remarks() {
					fmt.Fprintln(cmd.ErrOrStderr(), "remark:", r)
				}
				fmt.Fprintf(cmd.OutOrStdout(), "%s: valid\n", f)
			}
			if bad > 0 {
				return fmt.Errorf("%d of %d configurations are not valid", bad, len(files))
			}
			return nil
		},
	}
}

// run runs the node until SIGTERM or SIGINT. name is where the configuration comes from. It is read again for each
// value of hup.
func run(cfg *config.Config, name string, load func() (*config.Config, error), hup <-chan os.Signal,
	stderr io.Writer) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	err := daemon.Run(ctx, daemon.Options{
		Config: cfg, ConfigFile: name, Load: load, Reload: hup, Stderr: stderr, Version: version, Commit: commit(),
		Ready: func(a daemon.Addresses, reasons []admin.Reason) {
			if cfg.Log.Format == "text" { // who reads JSON is a program, and wants nothing else
				printAddresses(stderr, cfg, a, reasons)
			}
		},
	})
	if err != nil && cfg.Log.Format != "text" {
		daemon.NewLog(stderr, cfg.Log.Format, slog.LevelError).Error("jbofd has ended", "node", cfg.Node.Name, "error",
			err)
		return loggedError{err}
	}
	return err
}

// commit is the revision that the binary was built from. The go command notes none in a linked worktree of git, for
// instance.
func commit() string {
	if revision != "" {
		return revision
	}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				return s.Value
			}
		}
	}
	return "unknown"
}
