// Command jbofbench is jbofd's load generator.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
)

// errFailed makes the process exit with status 1 after everything worth saying was said.
var errFailed = errors.New("failed")

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	// A second signal ends the process at once.
	context.AfterFunc(ctx, stop)
	os.Exit(execute(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// version is set by the linker.
var version = "dev"

// exitInterrupted is 128 and the number of SIGINT, as of a shell.
const exitInterrupted = 130

// execute runs the command line and returns the exit status: 0 all well, 1 failed I/Os, failed
// verification or a target that cannot be reached, 2 a bad command line, 130 interrupted.
func execute(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	root := &cobra.Command{
		Use:           "jbofbench",
		Short:         "Load generator for jbofd and other NVMe-oF targets",
		Version:       version,
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return usagef("%v; see %s --help", err, c.CommandPath())
	})
	root.AddCommand(blockCommand(), demoCommand(), demoClusterCommand(), discoverCommand(), kvCommand(), simCommand())
	root.SetArgs(underscores(acceptYCSBFlags(args)))
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	var usage *usageError
	if ctx.Err() != nil {
		if err != nil && !errors.Is(err, errFailed) && !errors.Is(err, context.Canceled) {
			fmt.Fprintf(stderr, "jbofbench: %v\n", err)
		}
		fmt.Fprintln(stderr, "jbofbench: interrupted")
		return exitInterrupted
	}
	switch {
	case err == nil:
		return 0
	case errors.Is(err, errFailed):
		return 1
	case errors.As(err, &usage), strings.HasPrefix(err.Error(), "unknown "),
		strings.HasPrefix(err.Error(), "invalid argument"),
		strings.HasPrefix(err.Error(), "required flag"):
		fmt.Fprintf(stderr, "jbofbench: %v\n", err)
		return 2
	}
	fmt.Fprintf(stderr, "jbofbench: %v\n", err)
	return 1
}

// usageError is a command line that cannot be.
type usageError struct{ msg string }

func (e *usageError) Error() string { return e.msg }

func usagef(format string, args ...any) error { return &usageError{fmt.Sprintf(format, args...)} }

// underscores lets flags be written with hyphens too: --ramp-time is --ramp_time.
func underscores(args []string) []string {
	out := make([]string, len(args))
	for i, a := range args {
		if name, ok := strings.CutPrefix(a, "--"); ok {
			name, value, has := strings.Cut(name, "=")
			a = "--" + strings.ReplaceAll(name, "-", "_")
			if has {
				a += "=" + value
			}
		}
		out[i] = a
	}
	return out
}
