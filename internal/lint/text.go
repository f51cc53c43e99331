package lint

import (
	"bytes"
	"go/ast"
	"go/format"
	"go/token"
	"path"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"
)

// checkGofmt reports files that gofmt would change.
func checkGofmt(t *Tree, report Reporter) {
	t.files(true, everywhere, func(_ *Package, f *File) {
		if out, err := format.Source(f.Src); err != nil || !bytes.Equal(out, f.Src) {
			report(f.Path, "the file is not formatted: run gofmt -w %s", f.Path)
		}
	})
}

// checkName reports package names that do not say what the package is about.
func checkName(t *Tree, report Reporter) {
	for _, p := range t.Packages {
		for _, name := range []string{path.Base(p.Dir), p.Files[0].AST.Name.Name} {
			if slices.Contains(badNames, name) {
				report(p.Files[0].Path, "the package name %s does not say what the package is about: name it for its "+
					"subject, or move its parts to the packages that use them", name)
				break
			}
		}
	}
}

// checkSize limits the length of files. The size of a package is not limited.
func checkSize(t *Tree, report Reporter) {
	t.files(true, everywhere, func(_ *Package, f *File) {
		n := bytes.Count(f.Src, []byte("\n"))
		if n > maxFileLines {
			report(f.Path, "the file has %d lines, at most %d are allowed: split the file by subject", n, maxFileLines)
		}
	})
}

// checkWidth limits the width of lines. A line that begins inside a raw string literal may be wider, because a break
// would change the string.
func checkWidth(t *Tree, report Reporter) {
	t.files(true, everywhere, func(_ *Package, f *File) {
		raw := map[int]bool{} // lines that begin inside a raw string literal
		ast.Inspect(f.AST, func(n ast.Node) bool {
			if s, ok := n.(*ast.BasicLit); ok && s.Kind == token.STRING && s.Value[0] == '`' {
				first, last := t.Fset.Position(s.Pos()).Line, t.Fset.Position(s.End()).Line
				for line := first + 1; line <= last; line++ {
					raw[line] = true
				}
			}
			return true
		})
		line := 0
		for text := range strings.Lines(string(f.Src)) {
			line++
			text = strings.TrimSuffix(text, "\n")
			columns := utf8.RuneCountInString(text) + strings.Count(text, "\t")*(tabWidth-1)
			if columns > maxLineColumns && !raw[line] {
				pos := t.Fset.File(f.AST.FileStart).LineStart(line)
				report(pos, "the line has %d columns, at most %d are allowed with a tab as %d: break it", columns,
					maxLineColumns, tabWidth)
			}
		}
	})
}

// checkPackageComment reports packages without a package comment.
func checkPackageComment(t *Tree, report Reporter) {
	for _, p := range t.Packages {
		found, first := false, (*File)(nil)
		for _, f := range p.Files {
			if f.Test {
				continue
			}
			if first == nil {
				first = f
			}
			found = found || f.AST.Doc != nil
		}
		if first != nil && !found {
			report(first.Path, "package %s has no package comment: say in one file (doc.go, or the file with the main "+
				"type) what the package is, what it is not, and which code calls it", p.Dir)
		}
	}
}

// known lists methods that are documented by an interface of the standard library.
var known = []string{
	"String", "Error", "Unwrap", "Is", "As", "Len", "Less", "Swap", "Push", "Pop", "Format", "LogValue", "MarshalText",
	"UnmarshalText", "MarshalJSON", "UnmarshalJSON", "MarshalYAML", "UnmarshalYAML", "Read", "Write", "Close",
	"Describe", "Collect", "ServeHTTP",
}

// checkDoc reports exported symbols without a doc comment.
func checkDoc(t *Tree, report Reporter) {
	t.files(false, everywhere, func(p *Package, f *File) {
		if f.AST.Name.Name == "main" {
			return
		}
		wire := slices.Contains(wireFormats, p.Dir)
		for _, d := range f.AST.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				if d.Doc != nil || !d.Name.IsExported() || !exportedReceiver(d) {
					continue
				}
				if d.Recv != nil && (slices.Contains(known, d.Name.Name) || wire && oneLine(t.Fset, d)) {
					continue
				}
				report(d.Pos(), "exported %s has no doc comment: say in a sentence what it does, then units, owner of "+
					"buffers, errors, cost", d.Name.Name)
			case *ast.GenDecl:
				for _, s := range d.Specs {
					switch s := s.(type) {
					case *ast.TypeSpec:
						if s.Name.IsExported() && d.Doc == nil && s.Doc == nil && s.Comment == nil {
							report(s.Pos(), "exported type %s has no doc comment: say what it is, what owns it, and "+
								"its invariants", s.Name.Name)
						}
					case *ast.ValueSpec:
						if s.Names[0].IsExported() && d.Doc == nil && s.Doc == nil && s.Comment == nil {
							report(s.Pos(), "neither exported %s nor its group has a doc comment: say what it means "+
								"and its unit", s.Names[0].Name)
						}
					}
				}
			}
		}
	})
}

// exportedReceiver reports whether d is a function or a method of an exported type.
func exportedReceiver(d *ast.FuncDecl) bool {
	if d.Recv == nil {
		return true
	}
	x := d.Recv.List[0].Type
	for {
		switch y := x.(type) {
		case *ast.StarExpr:
			x = y.X
		case *ast.IndexExpr:
			x = y.X
		case *ast.IndexListExpr:
			x = y.X
		case *ast.Ident:
			return y.IsExported()
		default:
			return false
		}
	}
}

func oneLine(fset *token.FileSet, d *ast.FuncDecl) bool {
	// Two lines are allowed because gofmt breaks long setters after the brace.
	return fset.Position(d.End()).Line-fset.Position(d.Pos()).Line <= 2
}

var mark = regexp.MustCompile(`\b(TODO|FIXME|XXX)\b`)

// checkMark reports comments that announce work to be done: that belongs in an issue.
func checkMark(t *Tree, report Reporter) {
	t.files(true, everywhere, func(_ *Package, f *File) {
		for _, g := range f.AST.Comments {
			for _, c := range g.List {
				if m := mark.FindString(c.Text); m != "" {
					report(c.Pos(), "%s in a comment: do the work, or open an issue and describe here the present "+
						"behaviour", m)
				}
			}
		}
	})
}
