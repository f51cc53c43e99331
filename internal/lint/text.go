package lint

import (
	"bytes"
	"go/ast"
	"go/format"
	"go/scanner"
	"go/token"
	"path"
	"regexp"
	"slices"
)

// checkGofmt: source is as gofmt writes it.
func checkGofmt(t *Tree, report Reporter) {
	t.files(true, everywhere, func(_ *Package, f *File) {
		if out, err := format.Source(f.Src); err != nil || !bytes.Equal(out, f.Src) {
			report(f.Path, "not as gofmt writes it: run gofmt -w %s", f.Path)
		}
	})
}

// checkName: a package's name says what it holds.
func checkName(t *Tree, report Reporter) {
	for _, p := range t.Packages {
		for _, name := range []string{path.Base(p.Dir), p.Files[0].AST.Name.Name} {
			if slices.Contains(badNames, name) {
				report(p.Files[0].Path, "a package called %s says nothing: name it for the one idea it holds, or put its parts where they are used", name)
				break
			}
		}
	}
}

// checkSize: a package is one idea.
func checkSize(t *Tree, report Reporter) {
	for _, p := range t.Packages {
		n := 0
		for _, f := range p.Files {
			if f.Test {
				continue
			}
			n += codeLines(f.Src)
			if slices.Contains(wireFormats, p.Dir) {
				n -= accessors(t.Fset, f)
			}
		}
		if n > maxLines {
			report(p.Dir, "%d lines of code without comments and tests, the most is %d: a package is one idea, find the second one and give it a folder", n, maxLines)
		}
	}
}

// accessors counts the methods that stand on one line: a wire format's table of fields.
func accessors(fset *token.FileSet, f *File) (n int) {
	for _, d := range f.AST.Decls {
		if d, ok := d.(*ast.FuncDecl); ok && d.Recv != nil && fset.Position(d.Pos()).Line == fset.Position(d.End()).Line {
			n++
		}
	}
	return n
}

// codeLines counts the lines that hold more than comment or space.
func codeLines(src []byte) (n int) {
	fset := token.NewFileSet()
	file := fset.AddFile("", fset.Base(), len(src))
	var s scanner.Scanner
	s.Init(file, src, nil, 0)
	last := 0
	for {
		pos, tok, lit := s.Scan()
		if tok == token.EOF {
			return n
		}
		if tok == token.SEMICOLON && lit == "\n" {
			continue
		}
		first := file.Line(pos)
		end := first + bytes.Count([]byte(lit), []byte("\n"))
		n += end - max(first-1, last)
		last = end
	}
}

// checkPackageComment: a stranger reads what a package is for.
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
			report(first.Path, "package %s has no package comment: say what it is, what it is not, and who drives it, in one file (doc.go, or the one with the main type)", p.Dir)
		}
	}
}

// known are methods whose contract is an interface of the standard library.
var known = []string{
	"String", "Error", "Unwrap", "Is", "As", "Len", "Less", "Swap", "Push", "Pop", "Format", "LogValue", "MarshalText", "UnmarshalText",
	"MarshalJSON", "UnmarshalJSON", "MarshalYAML", "UnmarshalYAML", "Read", "Write", "Close", "Describe", "Collect", "ServeHTTP",
}

// checkDoc: exported symbols are documented.
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
				report(d.Pos(), "exported %s has no doc comment: what it does in a sentence, units, who owns buffers, errors, cost", d.Name.Name)
			case *ast.GenDecl:
				for _, s := range d.Specs {
					switch s := s.(type) {
					case *ast.TypeSpec:
						if s.Name.IsExported() && d.Doc == nil && s.Doc == nil && s.Comment == nil {
							report(s.Pos(), "exported type %s has no doc comment: what it is, who owns it, its invariants", s.Name.Name)
						}
					case *ast.ValueSpec:
						if s.Names[0].IsExported() && d.Doc == nil && s.Doc == nil && s.Comment == nil {
							report(s.Pos(), "exported %s has no doc comment, nor has its group: meaning and unit", s.Names[0].Name)
						}
					}
				}
			}
		}
	})
}

// exportedReceiver is true for functions and for methods of exported types.
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
	// Two lines' room: gofmt breaks long setters after the brace.
	return fset.Position(d.End()).Line-fset.Position(d.Pos()).Line <= 2
}

var mark = regexp.MustCompile(`\b(TODO|FIXME|XXX)\b`)

// checkMark: what is to be done is an issue, not a remark.
func checkMark(t *Tree, report Reporter) {
	t.files(true, everywhere, func(_ *Package, f *File) {
		for _, g := range f.AST.Comments {
			for _, c := range g.List {
				if m := mark.FindString(c.Text); m != "" {
					report(c.Pos(), "%s in a comment: do it, or open an issue and say here what holds meanwhile", m)
				}
			}
		}
	})
}
