// Command jbofctl is the operator's tool for a jbofd on the same machine.
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
	"time"

	"github.com/spf13/cobra"

	"jbofd/internal/admin"
)

// version is set by the linker.
var version = "dev"

// Where the admin socket of a daemon is unless its configuration says otherwise, and where the demonstration (make run,
// configs/demo.yaml) has it.
const (
	defaultSocket = "/run/jbofd/admin.sock"
	demoSocket    = "data/admin.sock"
)

// socketEnv names the same socket to jbofctl and, as admin.socket, to jbofd.
const socketEnv = "JBOFD_ADMIN_SOCKET"

// socketFrom returns the socket that is used without --socket: that of the environment, or the first that exists of
// the usual one and the demonstration's.
func socketFrom(env, usual, demo string) string {
	if env != "" {
		return env
	}
	for _, path := range []string{usual, demo} {
		if st, err := os.Stat(path); err == nil && st.Mode()&os.ModeSocket != 0 {
			return path
		}
	}
	return usual
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	os.Exit(execute(ctx, os.Args[1:], terminal{in: os.Stdin, out: os.Stdout, err: os.Stderr}))
}

// terminal is what a command talks to.
type terminal struct {
	in       io.Reader
	out, err io.Writer
}

// Exit statuses.
const (
	exitFailed   = 1
	exitUsage    = 2
	exitNotReady = 3 // of status --check and kv
	// exitInterrupted is 128 and the number of SIGINT, as of a shell.
	exitInterrupted = 130
)

// errNotReady makes status --check exit with exitNotReady after it has said why.
var errNotReady = errors.New("the node is not ready")

// errLoss makes kv check exit with exitNotReady after it has said what is lost.
var errLoss = errors.New("keys or values are lost; see jbofctl kv repair --help")

// errReplicaLoss is the same for a partition of a cluster, of which no operator repairs anything.
var errReplicaLoss = errors.New("keys or values are lost in this partition; the cluster repairs what it comes across " +
	"from other nodes (docs/cluster.md)")

// errIncomplete makes kv import exit with exitNotReady: what is missing in a file cannot be repaired.
var errIncomplete = errors.New("keys are missing in the export, which were damaged when it was made")

// interruptedError is the end of a command by a signal, and says how far it was.
type interruptedError struct{ msg string }

func (e *interruptedError) Error() string { return e.msg }

// Is makes it the error of a context that was cancelled.
func (e *interruptedError) Is(target error) bool { return target == context.Canceled }

// execute runs the command line and returns the exit status: 0 done, 1 failed, 2 a bad command line, 3 not ready or
// something damaged or lost, 130 interrupted.
func execute(ctx context.Context, args []string, t terminal) int {
	c := command(&cli{in: t.in})
	c.SetArgs(args)
	c.SetIn(t.in)
	c.SetOut(t.out)
	c.SetErr(t.err)
	completion(c)
	err := c.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	var interrupted *interruptedError
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		if !errors.As(err, &interrupted) {
			interrupted = &interruptedError{"interrupted"}
		}
		fmt.Fprintln(t.err, "jbofctl:", interrupted)
		return exitInterrupted
	}
	fmt.Fprintln(t.err, "jbofctl:", err)
	var usage *usageError
	switch {
	case errors.As(err, &usage):
		return exitUsage
	case errors.Is(err, errNotReady), errors.Is(err, errLoss), errors.Is(err, errReplicaLoss),
		errors.Is(err, errIncomplete):
		return exitNotReady
	}
	return exitFailed
}

// usageError is a command line that cannot be.
type usageError struct{ msg string }

func (e *usageError) Error() string { return e.msg }

func usagef(format string, args ...any) error { return &usageError{fmt.Sprintf(format, args...)} }

// cli is what all commands share.
type cli struct {
	in      io.Reader
	socket  string
	output  string
	timeout time.Duration
}

// command builds the tree of commands.
func command(x *cli) *cobra.Command {
	root := &cobra.Command{
		Use:   "jbofctl",
		Short: "Look at and manage the jbofd of this machine",
		Long: `Look at and manage the jbofd of this machine, over its admin socket.

Exit status: 0 done; 1 failed; 2 bad command line; 3 not ready (status --check), or something is
damaged or lost (kv check, repair, export, import); 130 interrupted.`,
		Version:       version,
		SilenceErrors: true,
		SilenceUsage:  true,
		PersistentPreRunE: func(*cobra.Command, []string) error {
			switch x.output {
			case "table", "json", "yaml":
			default:
				return usagef("--output is %q, must be table, json or yaml", x.output)
			}
			if x.timeout < 0 {
				return usagef("--timeout is %v, must be 0 (without limit) or more", x.timeout)
			}
			return nil
		},
	}
	fl := root.PersistentFlags()
	fl.StringVarP(&x.output, "output", "o", "table", "`FORMAT` of the answer: table, json or yaml")
	fl.StringVar(&x.socket, "socket", "", "the daemon's admin socket `PATH`; unless given, that in "+socketEnv+
		", else "+defaultSocket+
		", else that of a demonstration in this directory, "+demoSocket)
	fl.DurationVar(&x.timeout, "timeout", 30*time.Second, "how long to wait for the daemon, in kv import for each "+
		"batch; 0: without limit, the default of reloads, deletions and kv (kv export has no limit)")

	leaf := func(use, short string, args cobra.PositionalArgs,
		run func(*cobra.Command, []string) error) *cobra.Command {
		return &cobra.Command{Use: use, Short: short, Args: args, RunE: run}
	}
	noun := func(use, short string, verbs ...*cobra.Command) *cobra.Command {
		c := &cobra.Command{Use: use, Short: short, Args: cobra.ArbitraryArgs, RunE: oneOf}
		c.AddCommand(verbs...)
		return c
	}
	root.Args, root.RunE = cobra.ArbitraryArgs, func(c *cobra.Command, args []string) error {
		if len(args) > 0 {
			for _, noun := range c.Commands() {
				for _, verb := range noun.Commands() {
					if verb.Name() == args[0] {
						return usagef("unknown command %q; is it %q?", args[0], verb.CommandPath())
					}
				}
			}
			return usagef("unknown command %q; see jbofctl --help", args[0])
		}
		return c.Help()
	}
	root.AddCommand(
		x.statusCommand(),
		x.reloadCommand(),
		noun("ssd", "Drives", append(x.bindCommands(),
			leaf("list", "List the daemon's drives", none, x.ssdList),
			leaf("show NAME|PATH", "Show a drive and the extents on it, of the daemon or, by path, of a drive that "+
				"nobody uses", one("NAME|PATH"), x.ssdShow),
			leaf("smart-log NAME|PATH", "Show what a drive says of its health, with the names of nvme smart-log",
				one("NAME|PATH"), x.smartLog),
			x.formatCommand())...,
		),
		noun("subsystem", "NVM subsystems", leaf("list", "List the subsystems", none, x.subsystemList)),
		noun("namespace", "Namespaces",
			leaf("list", "List the namespaces, and those on drives that are no longer configured", none,
				x.namespaceList),
			x.namespaceDeleteCommand(),
		),
		noun("swap", "Swap areas, where writes of key-value namespaces go while their own drive has too much to do",
			leaf("list", "List the swap areas and the namespaces with keys in them, also areas that namespaces need "+
				"and no drive has", none, x.swapList),
			x.swapDiscardCommand(),
		),
		noun("kv", "Damage, export and import of key-value namespaces", x.kvCheckCommand(), x.kvScrubCommand(),
			x.kvRepairCommand(), x.kvOpenCommand(), x.kvExportCommand(), x.kvImportCommand()),
		noun("cluster", "The cluster of which the daemon is a node", x.clusterCommands()...),
		noun("connection", "Connections of hosts", leaf("list", "List the connections", none, x.connectionList)),
		noun("tenant", "Tenants, who share the drives",
			leaf("list", "List the tenants at each drive, and what limits them", none, x.tenantList)),
		noun("config", "The daemon's configuration", x.reloadCommand()),
	)
	usage := func(c *cobra.Command, err error) error {
		if strings.Contains(err.Error(), "time: ") {
			return usagef("%v; must be a duration, such as 500ms, 30s or 2m", err)
		}
		if flag, _, isNumber := strings.Cut(err.Error(), ": strconv."); isNumber {
			return usagef("%s; must be a whole number", flag)
		}
		return usagef("%v; see %s --help", err, c.CommandPath())
	}
	root.SetFlagErrorFunc(usage)
	return root
}

// completion adds cobra's command of that name, which would answer an unknown shell with its help and exit status 0.
// The root must have its output already.
func completion(root *cobra.Command) {
	root.InitDefaultCompletionCmd()
	for _, c := range root.Commands() {
		if c.Name() == "completion" {
			c.Args, c.RunE = cobra.ArbitraryArgs, oneOf
		}
	}
}

// oneOf answers a command that is incomplete without one of its subcommands.
func oneOf(c *cobra.Command, args []string) error {
	var names []string
	for _, v := range c.Commands() {
		if v.IsAvailableCommand() {
			names = append(names, v.Name())
		}
	}
	if len(args) > 0 {
		return usagef("unknown command %q; after %q comes one of: %s", args[0], c.CommandPath(),
			strings.Join(names, ", "))
	}
	return usagef("after %q comes one of: %s", c.CommandPath(), strings.Join(names, ", "))
}

func none(c *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usagef("%s takes no argument, got %q", nameOf(c), args[0])
	}
	return nil
}

func one(what string) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		if len(args) != 1 {
			return usagef("%s needs one argument, %s; got %d", nameOf(c), what, len(args))
		}
		return nil
	}
}

// nameOf is a command without the name of the program, which begins every error.
func nameOf(c *cobra.Command) string { return strings.TrimPrefix(c.CommandPath(), c.Root().Name()+" ") }

// ask calls the daemon with a bounded context.
func ask[T any](x *cli, c *cobra.Command, what func(*admin.Client, context.Context) (T, error)) (T, error) {
	ctx, cancel := x.bounded(c)
	defer cancel()
	return what(x.client(), ctx)
}

// bounded is the context of a request, which ends when --timeout says.
func (x *cli) bounded(c *cobra.Command) (context.Context, context.CancelFunc) {
	if x.timeout > 0 {
		return context.WithTimeout(c.Context(), x.timeout)
	}
	return context.WithCancel(c.Context())
}

// client returns a client for the daemon's socket, which may have appeared since the last call.
func (x *cli) client() *admin.Client {
	if x.socket != "" {
		return admin.NewClient(x.socket)
	}
	return admin.NewClient(socketFrom(os.Getenv(socketEnv), defaultSocket, demoSocket))
}
