package config

import (
	"fmt"
	"sort"
	"strconv"
	"strings"
)

// Problem is one thing that is wrong in a configuration.
type Problem struct {
	// File is the file's name as given to Parse, or "environment NAME".
	File string
	// Line and Column count from 1; 0 when the place is not in a file.
	Line, Column int
	// Field is the path of the field: ssds[1].size.
	Field string
	// Reason says what is wrong, with the value and what is allowed.
	Reason string
	cause  error
}

// Error writes the problem as file:line:column: field: reason.
func (p *Problem) Error() string {
	var b strings.Builder
	b.WriteString(p.File)
	if p.Line > 0 {
		fmt.Fprintf(&b, ":%d:%d", p.Line, p.Column)
	}
	b.WriteString(": ")
	if p.Field != "" {
		b.WriteString(p.Field + ": ")
	}
	b.WriteString(p.Reason)
	return b.String()
}

// Unwrap returns the error that the field causes, if the problem was made from one.
func (p *Problem) Unwrap() error { return p.cause }

// problem describes what is wrong with the field at a path.
func (c *Config) problem(path, reason string) *Problem {
	file := ""
	if at, ok := c.pos[""]; ok {
		file = at.file
	}
	at := c.pos.of(file, path)
	return &Problem{File: at.file, Line: at.line, Column: at.column, Field: path, Reason: reason}
}

// NamespaceProblem is err as a problem of a namespace, both counted from 0, for what only the drives know. Field is the
// one of the namespace that is wrong, or "".
func (c *Config) NamespaceProblem(subsystem, namespace int, field string, err error) error {
	path := index(join(index("subsystems", subsystem), "namespaces"), namespace)
	if field != "" {
		path = join(path, field)
	}
	return c.FieldProblem(path, err)
}

// FieldProblem is err as a problem of a field, for what is found out only when the configuration is used. It names the
// file or the variable of the environment that the field is from.
func (c *Config) FieldProblem(field string, err error) error {
	p := c.problem(field, err.Error())
	p.cause = err
	return p
}

// Errors are all problems found, in the order of their lines.
type Errors []*Problem

// maxLines bounds the problems that Error writes out.
const maxLines = 100

// Error writes one problem a line. Beyond maxLines it says how many there are.
func (e Errors) Error() string {
	var lines []string
	for _, p := range e[:min(len(e), maxLines)] {
		lines = append(lines, p.Error())
	}
	if more := len(e) - len(lines); more > 0 {
		lines = append(lines, fmt.Sprintf("and %d more problems", more))
	}
	return strings.Join(lines, "\n")
}

func (e Errors) sorted() Errors {
	sort.SliceStable(e, func(i, j int) bool {
		a, b := e[i], e[j]
		if (a.Line == 0) != (b.Line == 0) {
			return a.Line != 0
		}
		if a.Line != b.Line {
			return a.Line < b.Line
		}
		return a.Column < b.Column
	})
	return e
}

// position is where a field stands.
type position struct {
	file         string
	line, column int
}

// positions maps the paths of the fields given to where they stand.
type positions map[string]position

// of returns the place of a path, or of what encloses it.
func (p positions) of(file, path string) position {
	for path != "" {
		if at, ok := p[path]; ok {
			return at
		}
		path = parentPath(path)
	}
	return position{file: file}
}

func parentPath(path string) string {
	if i := strings.LastIndexAny(path, ".["); i >= 0 {
		return path[:i]
	}
	return ""
}

// join and index build paths.
func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

func index(path string, i int) string { return path + "[" + strconv.Itoa(i) + "]" }
