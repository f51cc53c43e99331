package lint

import (
	"go/ast"
	"regexp"
	"slices"
	"strings"
	"unicode"
)

// properNames lists names that begin like an identifier with capitals inside, and are none.
var properNames = []string{"NVMe"}

// firstWord matches the first word of a comment, if it can be an identifier. A possessive s does not belong to it.
var firstWord = regexp.MustCompile(`^([\pL_][\pL\pN_]*)(?:'s)?[ ,;:.]`)

// mixed matches words with a capital behind a small letter or digit, such as QPair.
var mixed = regexp.MustCompile(`[\p{Ll}\pN]\p{Lu}`)

// checkDocName reports doc comments that begin with the name of something else, which happens when the declaration is
// renamed or another one is put between the two. A first word counts as a name if it begins with a small letter, which
// no sentence does, or has a capital inside.
func checkDocName(t *Tree, report Reporter) {
	check := func(doc *ast.CommentGroup, names ...string) {
		if doc == nil {
			return
		}
		text := doc.Text()
		m := firstWord.FindStringSubmatch(text)
		if m == nil || strings.HasPrefix(text, "hot: ") {
			return
		}
		word := m[1]
		name := unicode.IsLower([]rune(word)[0]) || mixed.MatchString(word) && !slices.Contains(properNames, word)
		if name && !slices.Contains(names, word) {
			report(doc.Pos(), "the comment of %s begins with %s: begin it with the name that is declared, or with a "+
				"capital letter", strings.Join(names, ", "), word)
		}
	}
	t.files(true, everywhere, func(_ *Package, f *File) {
		for _, d := range f.AST.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				check(d.Doc, d.Name.Name)
			case *ast.GenDecl:
				for _, s := range d.Specs {
					switch s := s.(type) {
					case *ast.TypeSpec:
						check(ownDoc(d, s.Doc), s.Name.Name)
					case *ast.ValueSpec:
						var names []string
						for _, n := range s.Names {
							names = append(names, n.Name)
						}
						check(ownDoc(d, s.Doc), names...)
					}
				}
			}
		}
	})
}

// ownDoc returns the comment of one declaration in d: that of d if there is no other declaration in it.
func ownDoc(d *ast.GenDecl, doc *ast.CommentGroup) *ast.CommentGroup {
	if doc == nil && len(d.Specs) == 1 {
		return d.Doc
	}
	return doc
}
