package vm

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
)

// unpackPackages downloads the newest kernel of a platform, and the packages with other files of its guests, and
// unpacks them into tree. tmp is a folder for that.
func unpackPackages(tmp, tree string, p *Platform) error {
	// apt drops its rights for the download and must be able to write there.
	if err := os.Chmod(tmp, 0o777); err != nil {
		return err
	}
	options, err := aptOptions(tmp, p)
	if err != nil {
		return err
	}
	out, err := command(tmp, "apt-cache", append(options, "depends", p.kernelPackage())...)
	if err != nil {
		return fmt.Errorf("%w (when apt does not know the package: apt-get update)", err)
	}
	m := regexp.MustCompile(`(?m)^\s*Depends: (linux-image-\S+)$`).FindStringSubmatch(out)
	if m == nil {
		return fmt.Errorf("%s depends on no linux-image-… package: %s", p.kernelPackage(), out)
	}
	names := append([]string{m[1]}, p.packages...)
	if _, err := command(tmp, "apt-get", append(append(options, "download"), names...)...); err != nil {
		return fmt.Errorf("%w (when the package is gone from the mirror: apt-get update)", err)
	}
	debs, err := filepath.Glob(filepath.Join(tmp, "*.deb"))
	if err != nil {
		return err
	}
	if len(debs) != len(names) {
		return fmt.Errorf("apt-get download left %d packages, want %d", len(debs), len(names))
	}
	for _, deb := range debs {
		if _, err := command(tmp, "dpkg-deb", "-x", deb, tree); err != nil {
			return err
		}
	}
	return nil
}

// aptOptions are options for apt's commands, by which they know the packages of a platform. For one that is not this
// machine's, apt has lists of packages of its own below tmp, from the mirrors of this machine: the machine stays as it
// is, and no rights are needed.
func aptOptions(tmp string, p *Platform) ([]string, error) {
	if p.native {
		return nil, nil
	}
	lists := filepath.Join(tmp, "apt/lists")
	if err := os.MkdirAll(filepath.Join(lists, "partial"), 0o777); err != nil {
		return nil, err
	}
	options := []string{
		"-o", "APT::Architecture=" + p.Arch, "-o", "APT::Architectures::=" + p.Arch,
		"-o", "Dir::State::Lists=" + lists, "-o", "Dir::State::status=/dev/null", "-o", "Dir::Cache=" + tmp + "/apt",
		"-o", "Acquire::Languages=none", "-o", "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false",
	}
	_, err := command(tmp, "apt-get", append(options, "update", "-q")...)
	return options, err
}
